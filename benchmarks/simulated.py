"""What the simulator says of the tail benchmark's cases: the efficiency of each loader's policy, without its overhead.

The work is the case's own, at the costs measured for it; the policy is given as many samples in flight as the loader
may hold and the lateness that it allows. What a policy cannot know is unknown to it here too: a trivial sample that
takes a thousand times as long counts as one like the others until it has run. Nothing else is simulated: no interpreter
lock, no copying, no messages but for a fixed time for each of this loader's dispatches.
"""

from __future__ import annotations

import numpy as np

from benchmarks.peers import Loader
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.tail_run import Plan
from minato_gpu.lab.simulation.peers import BATCH_IN_ORDER, BATCH_OUT_OF_ORDER, BY_COMPLETION, simulate_peer
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Outcome, Work
from minato_gpu.scheduling.policy import Policy

_LATENESS = 8  # batches; what "bounded" allows
_TRIP_S = 2e-4  # between a dispatch and its report, beyond the work


def efficiency(plan: Plan, loader: Loader, in_flight: int, overhead: float = 1.0) -> float:
    """The bound over the simulated time, with at most ``in_flight`` samples prepared and not delivered.

    ``overhead``: every sample takes so many times its work.
    """
    outcome = _outcome(_work(plan, overhead), plan, loader, max(in_flight, plan.case.batch_size))
    return plan.bound_s() / (outcome.makespan_s + plan.step_s)


def _outcome(work: Work, plan: Plan, loader: Loader, window: int) -> Outcome:
    if isinstance(loader, Minato):
        fixed = loader.order == "in order"
        window = -(-window // work.batch) * work.batch  # whole batches, of which some samples are not prepared yet
        policy = Policy(window=window, fixed=fixed, max_lateness=0 if fixed else _LATENESS)
        return VirtualLoader(work, policy, plan.step_s, trip_s=_TRIP_S).run()
    lateness = 0 if loader.order == "in order" else work.batches
    return simulate_peer(_policy(loader), work, window, lateness, plan.step_s)


def _policy(loader: Loader) -> str:
    whole_batches = isinstance(loader, PyTorch) or getattr(loader, "by_batch", False)
    if not whole_batches:
        return BY_COMPLETION
    return BATCH_IN_ORDER if loader.order == "in order" else BATCH_OUT_OF_ORDER


def _work(plan: Plan, overhead: float) -> Work:
    """The timed epochs; costs are known from the one before, but for what happens too rarely to be foreseen."""
    costs = plan.operations * (overhead * plan.cpu_s / float(plan.operations.sum()))
    cpu = np.tile(costs, plan.epochs)
    predicted = np.full_like(cpu, np.median(costs)) if plan.case.trivial else cpu
    return Work(cpu, predicted, plan.case.batch_size, (len(costs),) * plan.epochs, plan.workers)
