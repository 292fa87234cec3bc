"""Cores that are shared: how long everything takes, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from minato_gpu.scheduling.policy import Policy
from minato_gpu.simulation.cores import ALONE, Cores, Pace
from minato_gpu.simulation.peers import BATCH_IN_ORDER, simulate_peer
from minato_gpu.simulation.virtual import VirtualLoader
from minato_gpu.simulation.work import Work

COUNT = 40


def makespan(loader: str, cores: Cores | None, step_s: float, workers: int = 1, prepare_s: float = 1.0) -> float:
    """Until the last step ends, of single samples with a step each; a window that is never full."""
    cost = np.full(COUNT, prepare_s)
    work, steps = Work(cost, cost, 1, (COUNT,), workers), [step_s] * COUNT
    if loader == "torch":
        outcome = simulate_peer(BATCH_IN_ORDER, work, COUNT, 0, steps, cores)
    else:
        outcome = VirtualLoader(work, Policy(COUNT, fixed=True), steps=steps, precise=True, cores=cores).run()
    end = outcome.times[-1] + step_s  # nothing is prepared any more: the last step has a core
    return float(end)


@pytest.mark.parametrize(
    ("cores", "workers", "worker"),
    [
        (Cores(2, 1.0), 2, 1.0),
        (Cores(2, 1.0), 4, 2.0),
        (Cores(2, 1.0, other=1.0), 2, 2.0),
        (Cores(2, 0.0), 64, 1.0),
        (Cores(2, 0.5), 8, 2.0),  # half of each of eight is four cores' work
    ],
)
def test_computing_takes_longer_where_cores_are_short(cores: Cores, workers: int, worker: float) -> None:
    assert cores.stretch(workers) == pytest.approx(worker)


@pytest.mark.parametrize(
    ("cores", "workers", "pace"),
    [
        (Cores(2, 1.0, consumer=1.0), 1, ALONE),
        (Cores(2, 1.0, consumer=1.0), 2, Pace(1.5, 1.5)),  # three threads on two cores
        (Cores(2, 1.0, consumer=2.0), 2, Pace(2.0, 2.0)),  # four
        (Cores(2, 1.0, consumer=0.0), 2, ALONE),
    ],
)
def test_a_step_that_computes_shares_the_cores(cores: Cores, workers: int, pace: Pace) -> None:
    assert cores.pace(workers, stepping=True) == pytest.approx(pace)
    assert cores.pace(workers) == ALONE


@pytest.mark.parametrize("computed", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("consumer", [0.3, 1.0, 2.5])
def test_no_more_is_computed_than_there_are_cores(computed: float, consumer: float) -> None:
    cores = Cores(2, computed, consumer)
    pace = cores.pace(16, stepping=True)
    assert 16 * computed / pace.worker + consumer / pace.consumer == pytest.approx(2)
    assert pace.worker > 1 <= pace.consumer


def test_no_more_work_at_once_than_cores_serve() -> None:
    assert Cores(2, 1.0).at_once(8) == 2 and Cores(2, 0.25).at_once(8) == 8 and Cores(2, 0.0).at_once(8) == 8


@pytest.mark.parametrize("loader", ["torch", "ours"])
class TestEpoch:
    """One worker, samples of one second each, steps of half a second."""

    def test_one_core_does_all_of_it(self, loader: str) -> None:
        assert makespan(loader, Cores(1, 1.0, consumer=1.0), 0.5) == pytest.approx(COUNT * 1.5, rel=0.02)

    def test_two_cores_do_both_at_once(self, loader: str) -> None:
        assert makespan(loader, Cores(2, 1.0, consumer=1.0), 0.5) == pytest.approx(COUNT + 0.5)
        assert makespan(loader, Cores(2, 1.0, consumer=1.0), 0.5) == makespan(loader, None, 0.5)

    def test_a_step_that_waits_takes_nothing_from_the_worker(self, loader: str) -> None:
        assert makespan(loader, Cores(1, 1.0, consumer=0.0), 0.5) == pytest.approx(COUNT + 0.5)

    def test_a_worker_that_waits_leaves_the_core_to_the_step(self, loader: str) -> None:
        assert makespan(loader, Cores(1, 0.0, consumer=1.0), 1.5) == pytest.approx(1 + 1.5 * COUNT)

    def test_a_step_of_two_threads_is_slower_while_workers_compute(self, loader: str) -> None:
        """Eighty core seconds of steps and forty of preparing, on two cores: sixty seconds, and the first sample's, in
        which a core has nothing to do."""
        found = makespan(loader, Cores(2, 1.0, consumer=2.0), 1.0)
        assert found == pytest.approx(60.5, rel=0.02)
