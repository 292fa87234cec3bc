"""What a worker notes of the samples of a task."""

from __future__ import annotations

from time import thread_time

import pytest

from minato_gpu.lanes.progress import Progress
from tests.lanes.harness import piece, task


@pytest.mark.parametrize("late", [10.0, 0.0], ids=["an earlier wait is told late", "no wait"])
def test_what_a_sample_has_run_it_has_not_waited(late: float) -> None:
    """The kernel may tell of a wait for a core once the thread has gone on for a while."""
    delays = iter([0.0, late])
    progress = Progress(task(piece([0])), lambda: next(delays))
    begin = thread_time()
    while (ran := thread_time() - begin) < 2e-3:
        pass
    progress.add(None)
    assert progress.times[0] >= 0.9 * ran
