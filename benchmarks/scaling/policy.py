"""What this loader's window allows on a cell, and what its policy alone reaches there under a virtual clock.

Both are shares of the cell's bound, in the middle of three epochs whose costs are known. Where costs have a tail, what
is measured stands beside them: the difference is what the loader itself spends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.scaling.cells import BATCH_SIZE
from benchmarks.scaling.measure import Plan
from minato_gpu.lab.simulation.bounds import held_bound
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Work
from minato_gpu.scheduling.policy import Policy

_EPOCHS = 3
_PREFETCH = 2  # batches of the window for each worker: the default
_LATENESS = 8  # batches: what "bounded" allows


class Reach(NamedTuple):
    """``window_allows``: no policy with this window and lateness can be closer to the bound; ``simulated``: ours is."""

    window_allows: float
    simulated: float


def reach(plan: Plan, *, in_order: bool) -> Reach:
    """For this loader in its order."""
    count, rng = len(plan.costs_s), np.random.default_rng(0)
    costs_s = np.concatenate([plan.worth_s[rng.permutation(count)] for _ in range(_EPOCHS)])
    work = Work(costs_s, costs_s, BATCH_SIZE, (count,) * _EPOCHS, plan.cell.workers)
    window, lateness = _PREFETCH * plan.cell.workers * BATCH_SIZE, 0 if in_order else _LATENESS
    policy = Policy(window=window, fixed=in_order, max_lateness=lateness)
    times = VirtualLoader(work, policy, plan.step_s).run().times
    least_s = max(plan.work_s, plan.batches * plan.step_s)
    middle_s = float(times[2 * plan.batches - 1] - times[plan.batches - 1])
    held_s = held_bound(work, window, lateness, plan.step_s)
    return Reach(min(1.0, _EPOCHS * least_s / held_s), least_s / middle_s)
