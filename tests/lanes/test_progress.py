"""What samples of a large task are told to have cost, where their worker has waited for a core."""

from __future__ import annotations

import pytest

from minato_gpu.lanes.base import Piece, Task
from minato_gpu.lanes.progress import LeaseProgress
from minato_gpu.samples import Position

SAMPLES = 32


class Waits:
    """Seconds that a thread has waited for a core so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def waits() -> Waits:
    return Waits()


def progress_of(waits: Waits, times: list[float]) -> LeaseProgress:
    """Samples that took so long, of a task in which single waits are not told apart."""
    task = Task(1, 0, "run", 0, 0, (Piece(Position(0), [*range(SAMPLES)], None),))
    progress = LeaseProgress(task, waits)
    assert not progress.delayed
    progress.times += times
    return progress


def test_what_a_worker_has_waited_is_taken_from_the_samples_that_took_longest(waits: Waits) -> None:
    progress = progress_of(waits, [1e-4] * 5 + [4.1e-3] + [1e-4] * 5)
    waits.seconds = 4e-3
    times, _, elapsed = progress.told()
    assert times == pytest.approx([1e-4] * 11)
    assert elapsed == pytest.approx(10 * 1e-4 + 4.1e-3)


def test_a_costly_sample_among_cheap_ones_keeps_what_nobody_has_waited(waits: Waits) -> None:
    progress = progress_of(waits, [1e-4] * 5 + [4.1e-3] + [1e-4] * 5)
    waits.seconds = 1e-3
    times, _, _ = progress.told()
    assert times == pytest.approx([1e-4] * 5 + [3.1e-3] + [1e-4] * 5)


def test_nothing_is_taken_below_what_most_samples_took(waits: Waits) -> None:
    progress = progress_of(waits, [1e-4] * 11)
    waits.seconds = 5e-3
    assert progress.told()[0] == pytest.approx([1e-4] * 11)


def test_waits_that_were_told_are_not_told_again(waits: Waits) -> None:
    progress = progress_of(waits, [1e-4, 1e-4, 3.1e-3])
    waits.seconds = 3e-3
    assert progress.told()[0] == pytest.approx([1e-4] * 3)
    progress.times += [1e-4, 1e-4, 3.1e-3]
    assert progress.told()[0] == pytest.approx([1e-4, 1e-4, 3.1e-3])
