"""Named scenarios under a virtual clock: this scheduler, its bounds, and the peers' policies beside it.

Two runs make a row. In one the consumer takes batches at once: its time is ``makespan_s``. In the other it asks for
95 % of capacity: for a batch every limit / (0.95 batches) seconds, where the limit is the time in which the best
threshold in hindsight could prepare all with the same predictions. ``efficiency`` is ``bounds.held_bound``, the bound
that holds for every policy under the row's window, lateness and period, over the time until the end of the last step.
Displacement (positions, either way) is that of the first run.

The peers get the same window (samples admitted and not delivered) and the same lateness. ``sample by completion`` and
this scheduler compose batches of what is ready where lateness is allowed. Times are means over the seeds,
``displacement_max`` is the largest of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from minato_gpu.lab.simulation.bounds import held_bound, lp_bound, threshold_limit
from minato_gpu.lab.simulation.peers import PEERS, simulate_peer
from minato_gpu.lab.simulation.scenarios import SCENARIOS, Scenario
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Outcome, Work
from minato_gpu.samples import JSON
from minato_gpu.scheduling.policy import Policy

__all__ = ["OURS", "SCENARIOS", "run"]

OURS = "minato"
DEMAND = 0.95  # share of capacity that the consumer asks for

Row = dict[str, JSON]
Simulate = Callable[[Work, float], Outcome]
"""Simulates a policy on a work, with the seconds that the consumer takes for a batch."""


def run(names: Sequence[str], seeds: int) -> list[Row]:
    """Returns a row for each scenario, window, lateness, prediction error and policy.

    Raises KeyError for a name that is not in ``SCENARIOS``.
    """
    rows: list[Row] = []
    for scenario in [SCENARIOS[name] for name in names]:
        for window in scenario.windows:
            for lateness in scenario.latenesses:
                for error in scenario.errors:
                    policies = {name: peer(name, window, lateness) for name in PEERS}
                    policies = {OURS: ours(scenario, window, lateness), **policies}
                    for name, simulate in policies.items():
                        rows.append(_row(scenario, window, lateness, error, seeds, simulate, policy=name))
    return rows


def _row(
    scenario: Scenario, window: int, lateness: int, error: float, seeds: int, simulate: Simulate, **named: str
) -> Row:
    """Returns the row of one policy in one setting: the mean over the seeds."""
    cells = [_measure(scenario.work(seed, error), window, lateness, simulate) for seed in range(seeds)]
    key = {"window": window, "max_lateness": lateness, "prediction_error": error}
    row: Row = {"scenario": scenario.name, **named, **key}
    row |= {name: float(np.mean([cell[name] for cell in cells])) for name in cells[0]}
    row["displacement_max"] = max(cell["displacement_max"] for cell in cells)
    return row


def ours(scenario: Scenario, window: int, lateness: int, **changes: JSON) -> Simulate:
    """Returns a function that simulates this scheduler in the setting; ``changes`` are arguments of its ``Policy``."""
    settings = {"window": window, "fixed": lateness == 0, "max_lateness": lateness, **scenario.policy, **changes}
    policy = Policy(**settings)
    return lambda work, period: VirtualLoader(work, policy, period).run()


def peer(policy: str, window: int, lateness: int) -> Simulate:
    """Returns a function that simulates a peer's policy in the setting."""
    return lambda work, period: simulate_peer(policy, work, window, lateness, period)


def _measure(work: Work, window: int, lateness: int, simulate: Simulate) -> Row:
    """Returns the figures of one seed: of an unhindered run, and of one with the consumer."""
    bound, limit = lp_bound(work), threshold_limit(work)
    period = limit / (DEMAND * work.batches)
    free, paced = simulate(work, 0.0), simulate(work, period)
    displacement = np.abs(free.serials - np.arange(len(free.serials)))
    p50, p99 = np.percentile(displacement, [50, 99]).tolist()
    return {
        "bound_s": bound,
        "makespan_s": free.makespan_s,
        "of_bound": bound / free.makespan_s,
        "of_limit": limit / free.makespan_s,
        "efficiency": held_bound(work, window, lateness, period) / (paced.makespan_s + period),
        "first_batch_s": paced.first_batch_s,
        "displacement_p50": p50,
        "displacement_p99": p99,
        "displacement_max": int(displacement.max()),
    }
