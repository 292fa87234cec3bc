"""How many workers are at work, on a model of a training run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minato_gpu.scheduling.worker_count import WorkerCount

BATCH = 16


class Training:
    """A consumer whose steps take ``step_s``; workers of whom each prepares a sample in ``sample_s``, on ``cores``."""

    def __init__(self, count: WorkerCount, sample_s: float, step_s: float, cores: float) -> None:
        self.count, self.sample_s, self.step_s, self.cores = count, sample_s, step_s, cores
        self.now = 0.0
        self.seen: list[int] = []

    def run(self, seconds: float) -> None:
        """Deliver batches for so long."""
        end = self.now + seconds
        while self.now < end:
            prepared_s = BATCH * self.sample_s / min(self.count.workers, self.cores)
            took_s = max(prepared_s, self.step_s)
            idle = int(self.count.workers * (1 - prepared_s / took_s))
            self.now += took_s
            self.count.waited("preparation", took_s - self.step_s)
            self.count.delivered(self.now, BATCH, idle)
            self.seen.append(self.count.workers)

    def later(self, seconds: float) -> list[int]:
        """The numbers that are seen in the second half of so long a time."""
        self.run(seconds / 2)
        del self.seen[:]
        self.run(seconds / 2)
        return self.seen


def test_more_are_at_work_while_that_pays() -> None:
    training = Training(WorkerCount(2, 16), 0.01, 0.0, cores=64)
    training.run(10.0)
    assert training.count.workers == 16 and training.seen[0] == 2


def test_a_consumer_that_never_waits_gets_no_more() -> None:
    training = Training(WorkerCount(4, 16), 0.01, 0.1, cores=64)
    training.run(20.0)
    assert set(training.seen) == {4}


def test_as_many_as_the_steps_need() -> None:
    """16 samples of 10 ms in a step of 20 ms are eight workers' work."""
    training = Training(WorkerCount(2, 32), 0.01, 0.02, cores=64)
    assert 8 <= min(training.later(40.0)) <= max(training.seen) <= 12


def test_where_cores_are_short_others_are_tried_seldom() -> None:
    training = Training(WorkerCount(4, 16), 0.01, 0.0, cores=4)
    seen = training.later(400.0)
    assert max(seen) == 6 and seen.count(4) > 0.95 * len(seen)


@pytest.mark.parametrize(("sample_s", "step_s"), [(0.01, 0.0), (0.0001, 0.05), (0.05, 0.02)])
def test_the_limits_hold(sample_s: float, step_s: float) -> None:
    training = Training(WorkerCount(3, 7), sample_s, step_s, cores=64)
    training.run(30.0)
    assert set(training.seen) <= set(range(3, 8))


def _changed(change: Callable[[Training], None]) -> Training:
    training = Training(WorkerCount(2, 16), 0.01, 0.02, cores=64)
    training.run(30.0)
    change(training)
    return training


def test_samples_that_become_cheaper_send_workers_to_rest() -> None:
    training = _changed(lambda training: setattr(training, "sample_s", 0.002))
    assert max(training.later(40.0)) <= 4


def test_samples_that_become_dearer_bring_them_back() -> None:
    training = _changed(lambda training: setattr(training, "sample_s", 0.02))
    assert min(training.later(40.0)) >= 15


def test_the_time_between_epochs_does_not_count() -> None:
    training = Training(WorkerCount(4, 16), 0.01, 0.1, cores=64)
    for _ in range(6):
        training.run(0.4)
        training.now += 60.0
        training.count.begin(training.now)
    assert training.count.workers == 4
