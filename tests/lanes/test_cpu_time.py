"""Time on cores: counted for the calling thread and a library's, and for nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minato_gpu.lanes.cpu_time import CoreTime, RunQueueDelay
from tests.support.leaks import leaks, take_snapshot
from tests.support.waiting import wait_until


@contextmanager
def _busy_thread(name: str) -> Iterator[Callable[[], float]]:
    """A thread of that name (as the kernel knows it) that computes; the function says for how long it has."""
    ready, stop, ran = threading.Event(), threading.Event(), [0.0]

    def compute() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        ready.set()
        while not stop.is_set():
            ran[0] = time.thread_time()

    thread = threading.Thread(target=compute)
    thread.start()
    assert ready.wait(60)
    try:
        yield lambda: ran[0]
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("name", "wanted", "counts"),
    [("[Library] Executor", True, True), ("[Other] Executor", True, False), ("[Library] Executor", False, False)],
)
def test_threads_of_the_library_count(name: str, wanted: bool, counts: bool) -> None:
    cores = CoreTime("Library", wanted=wanted)
    with _busy_thread(name) as ran:
        cores.look()
        before, own, theirs = cores(), time.thread_time(), ran()
        assert wait_until(lambda: ran() > theirs + 0.2)
        used, own = cores() - before, time.thread_time() - own
    assert (used > own + 0.1) is counts
    cores.close()


def test_the_calling_thread_counts() -> None:
    cores = CoreTime("Library")
    before, start = cores(), time.thread_time()
    while time.thread_time() < start + 0.05:
        pass
    assert cores() - before > 0.04
    cores.close()


def test_what_is_not_wanted_opens_nothing() -> None:
    before = take_snapshot()
    cores = CoreTime("Library", wanted=False)
    with _busy_thread("[Library] Executor"):
        cores.look()
        assert not leaks(before) or take_snapshot().descriptors == before.descriptors
    cores.close()


def test_a_thread_that_ended_is_let_go() -> None:
    before = take_snapshot()
    cores = CoreTime("Library")
    with _busy_thread("[Library] Executor"):
        cores.look()
    assert cores() >= 0.0
    cores.look()
    cores.close()
    cores.close()
    assert not leaks(before)


def test_a_thread_that_waits_has_not_run() -> None:
    delay = RunQueueDelay()
    with _busy_thread("one"), _busy_thread("two"), _busy_thread("three"):
        begin, ran = time.perf_counter(), time.thread_time()
        waited = delay()
        while time.thread_time() < ran + 0.1:
            pass
        waited = delay() - waited
        took = time.perf_counter() - begin  # last: it may have to wait for a core at any of these lines
    assert 0.0 <= waited <= took
    delay.close()
