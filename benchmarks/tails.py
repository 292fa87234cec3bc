"""Slow samples: how close every loader comes to the lower bound of the time that its work takes.

A consumer takes batch after batch and trains for a fixed time on each. That step is emulated: the consumer reads every
byte of the batch and sleeps for the rest of the step (an emulated accelerator, which takes no core). The work is so
many operations for each sample, the same for every loader.

    bound      = minimum to the first batch + max(steps, single-process CPU seconds / cores)
    efficiency = bound / measured

The minimum to the first batch is the work of the cheapest samples that make a batch, on all cores. Every loader runs
in a fresh process, after another that took one batch, so that its files are in memory. Its first batch is timed from
its construction, cold; that epoch goes on without steps and warms the workers up; then the clock starts for the epochs
that count. What a loader had prepared of those before the clock started (some overlap epochs) is taken off the work in
its bound, and what it prepares meanwhile for later ones is added, so that it neither gains nor loses by it. Loaders
take turns within each repetition. ``simulated_efficiency`` is what the loader's policy reaches under a virtual clock
with as many samples in flight and the lateness that it allows: no interpreter lock, no copying, no messages but for a
fixed time for each of this loader's dispatches; what happens too rarely to be foreseen is unknown to it here, too.
``simulated_with_overhead``: where every sample takes as much longer as all processes together took CPU time beyond the
work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.isolate import isolated
from benchmarks.peers import COSTLY, TRIVIAL, Loader
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.tail_run import CASES, Plan, Run, rehearse, run
from benchmarks.turns import cases_called, measured_rows, present
from benchmarks.work import calibrate, sleep_overshoot_s
from minato_gpu.lab.simulation.peers import BATCH_IN_ORDER, BATCH_OUT_OF_ORDER, BY_COMPLETION, simulate_peer
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Outcome, Work
from minato_gpu.scheduling.policy import Policy

_LATENESS = 8  # batches; what "bounded" allows
_TRIP_S = 2e-4  # between a dispatch and its report, beyond the work


def case_rows(plan: Plan, loaders: Sequence[Loader], repetitions: int) -> Iterator[dict[str, Any]]:
    """A row for each loader on one case; the loaders take turns within each repetition."""
    timeout_s = 60 + 20 * plan.bound_s()

    def measure(loader: Loader) -> Run:
        isolated(rehearse, plan, loader, timeout_s=timeout_s)
        return isolated(run, plan, loader, timeout_s=timeout_s)

    def figures(one: Run) -> str:
        return f"{one.efficiency:.3f}, first batch {one.first_batch_s:.3f} s"

    rows, _ = measured_rows(plan.case.name, loaders, repetitions, measure, figures)
    for row, loader in zip(rows, loaders, strict=True):
        row |= {
            "warm": loader.warm,
            "emulated_step_s": plan.step_s,
            "cpu_s_alone": plan.cpu_s,
            "loader_settings": ", ".join(f"{key}={value}" for key, value in loader.settings(plan.job()).items()),
        }
        if row["repetitions"]:
            in_flight = int(row["peak_bytes_in_flight"]) // (8 * plan.case.words)
            overhead = plan.overhead(row["cpu_s"], row["prepared_ahead_s"], row["left_ahead_s"])
            row["simulated_efficiency"] = simulated(plan, loader, in_flight)
            row["simulated_with_overhead"] = simulated(plan, loader, in_flight, overhead)
        yield row


def simulated(plan: Plan, loader: Loader, in_flight: int, overhead: float = 1.0) -> float:
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
    return simulate_peer(_peer_policy(loader), work, window, lateness, plan.step_s)


def _peer_policy(loader: Loader) -> str:
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


@report.benchmark("tails", 3, step="emulated")
@report.loader_option
@report.case_option
@report.workers_option
def main(
    quick: bool, repetitions: int, wanted: Sequence[str], names: Sequence[str], workers: int
) -> Iterator[dict[str, Any]]:
    cases, loaders = cases_called(CASES, names), present([*COSTLY, *TRIVIAL], wanted)
    per_ms = calibrate() * (0.1 if quick else 1.0)  # a toy run takes a tenth of the work for each sample, too
    overshoot_s = sleep_overshoot_s()
    for case in cases:
        plan = isolated(Plan.measured, case, workers, per_ms, overshoot_s, quick)
        chosen = [loader for loader in (TRIVIAL if case.trivial else COSTLY) if loader in loaders]
        yield from case_rows(plan, chosen, repetitions)


if __name__ == "__main__":
    main()
