"""Services that a process has once for all its loaders: they begin with the first loader and end with the last.

A forked process inherits none: their descriptors are closed in it before anything else runs, so that no worker holds a
listening socket or answers for its parent. It begins its own with the first loader that it iterates.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

from minato_gpu.observe.counters import Counts
from minato_gpu.samples import JSON
from minato_gpu.util.messages import LOGGER
from minato_gpu.util.threads import OwnThread


class LoaderSnapshot(NamedTuple):
    """The report on a loader at one moment."""

    epoch: int  # number of the current or last epoch
    stats: dict[str, JSON]  # counts of that epoch
    ended: Counts  # counted in the epochs before it, if Prometheus needs it


class StatsProvider(Protocol):
    """A loader's interface for its watchers. Any thread may ask."""

    kind: str  # a word for what it loads: the data set's class

    def snapshot(self) -> LoaderSnapshot | None:
        """Returns the loader's present counts; None before its first epoch."""


StatsProviders = Callable[[], list[tuple[str, StatsProvider]]]
"""Returns the loaders that live, each with its name: what it loads, and the smallest number that was free."""


class SocketThread:
    """A thread that sleeps at a listening socket until somebody connects. Nothing in it is periodic.

    ``answer`` is called in the thread when the descriptor ``fd`` is readable; what it raises is logged. ``leave``
    closes the socket, once the thread no longer waits for it. If the constructor raises, the caller closes the socket.
    """

    def __init__(self, fd: int, answer: Callable[[], None], leave: Callable[[], None], name: str) -> None:
        self._fd = fd
        self._answer, self._leave = answer, leave
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = OwnThread(target=self._attend, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._wake)
            raise

    def _attend(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while self._wake not in dict(poll.poll()):
            try:
                self._answer()
            except OSError:
                LOGGER.debug("whoever asked how the loaders stand has gone", exc_info=True)
            except Exception:
                LOGGER.exception("how the loaders stand could not be told")
        self.abandon()

    def close(self, *, wait: bool) -> None:
        """Ends the thread; with ``wait``, returns once it has let go of the socket."""
        os.eventfd_write(self._wake, 1)
        if wait:
            self._thread.join()

    def abandon(self) -> None:
        """Closes all descriptors: of a thread that ends, or in a forked process, which does not have the thread."""
        os.close(self._wake)
        self._leave()


class SharedService:
    """Runs a service while there is a loader.

    ``start`` is called for the first loader, with a function that returns all loaders that live. What it raises,
    ``add`` raises.
    """

    def __init__(self, start: Callable[[StatsProviders], SocketThread]) -> None:
        self._start = start
        self._lock = threading.RLock()  # the collector may end a loader while this thread holds it
        self._served: dict[int, tuple[str, weakref.ref[StatsProvider]]] = {}
        self.running: SocketThread | None = None
        _services.append(self)

    def add(self, provider: StatsProvider) -> None:
        """Serves a loader until it is gone. Does nothing if it is served already."""
        if any(known() is provider for _, known in self._served.copy().values()):
            return
        with self._lock:
            number = next(free for free in range(1, len(self._served) + 2) if free not in self._served)
            self._served[number] = f"{provider.kind}-{number}", weakref.ref(provider)
            try:
                if self.running is None:
                    self.running = self._start(self.providers)
            except BaseException:
                del self._served[number]
                raise
        weakref.finalize(provider, self._remove, number, os.getpid())

    def providers(self) -> list[tuple[str, StatsProvider]]:
        """Returns the loaders that live, with their names."""
        found = [(name, known()) for name, known in self._served.copy().values()]
        return [(name, provider) for name, provider in found if provider is not None]

    def _remove(self, number: int, process: int) -> None:
        """Removes a loader that is gone.

        A thread of this package, which others may wait for, waits for nothing here.
        """
        if process != os.getpid():
            return
        with self._lock:
            self._served.pop(number, None)
            if not self._served and self.running is not None:
                running, self.running = self.running, None
                running.close(wait=not OwnThread.is_current())

    def forget(self) -> None:
        """Begins without loaders in a forked process, where no thread is left to release the lock."""
        self._lock = threading.RLock()
        self._served = {}
        running, self.running = self.running, None
        if running is not None:
            running.abandon()


_services: list[SharedService] = []


def _forget_all() -> None:
    for service in _services:
        service.forget()


os.register_at_fork(after_in_child=_forget_all)
