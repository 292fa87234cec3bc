"""The package's own threads: signals do not end them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from minato_gpu import DataLoader
from minato_gpu.threads import OwnThread, await_event
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """A signal that Python handles, as SIGCHLD is once PyTorch's own loader has had workers."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGUSR1, before)


def _interrupt(threads: list[Any], handled: list[int]) -> None:
    """Give each the signal a few times: at least one of them finds it waiting."""
    for _ in range(5):
        for thread in threads:
            count = len(handled)
            if thread.is_alive():
                signal.pthread_kill(thread.ident, signal.SIGUSR1)
                assert wait_until(lambda count=count: len(handled) > count)  # type: ignore[misc]


def test_an_event_is_awaited_through_signals(handled: list[int]) -> None:
    fd, raised = os.eventfd(0, os.EFD_CLOEXEC), []

    def wait() -> None:
        try:
            await_event(fd)
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    _interrupt([thread], handled)
    os.eventfd_write(fd, 1)
    thread.join()
    assert not raised
    os.set_blocking(fd, False)
    with pytest.raises(BlockingIOError):  # it was made unreadable
        os.eventfd_read(fd)
    os.close(fd)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is asked whether they live
def test_a_loaders_threads_go_on_after_a_signal(handled: list[int]) -> None:
    numbers: Any = range(64)
    before, loader = threading.enumerate(), DataLoader(numbers, 4, num_workers=1, worker_kind="thread")
    iterator: Any = iter(loader)
    got = next(iterator).tolist()
    own = [thread for thread in {*threading.enumerate()} - {*before} if isinstance(thread, OwnThread)]
    assert {"minato-pump", "minato-worker-0"} <= {thread.name for thread in own}
    _interrupt(own, handled)
    assert all(thread.is_alive() for thread in own)
    assert got + [key for batch in iterator for key in batch.tolist()] == list(numbers)
