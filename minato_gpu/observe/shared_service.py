"""What a process has once for all its loaders: it begins with the first, and ends with the last, or when Python ends.

A forked process has none of its parent's: the descriptors are closed in it before anything else runs, so that no worker
holds a listening socket, and nobody answers for its parent. It begins its own with a loader that it iterates itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from minato_gpu.observe.told import Teller
from minato_gpu.threads import OwnThread

Tellers = Callable[[], list[tuple[str, Teller]]]
"""Those that live, with names: what they load, and the smallest number that was free when they came."""


class Running(Protocol):
    """What runs."""

    def close(self, *, wait: bool) -> None:
        """End it; ``wait`` until it has ended."""

    def abandon(self) -> None:
        """In a forked process: close what was inherited, and touch nothing that is the parent's."""


class SharedService:
    """``start`` is called for the first loader, with what tells of those that live; raises what ``add`` is to raise."""

    def __init__(self, start: Callable[[Tellers], Running]) -> None:
        self._start = start
        self._lock = threading.RLock()  # the collector may end a loader while this thread holds it
        self._served: dict[int, tuple[str, weakref.ref[Teller]]] = {}
        self.running: Running | None = None
        _services.append(self)

    def add(self, owner: object, teller: Teller) -> None:
        """Serve it until ``owner`` is gone. Nothing changes where it is served already."""
        if any(known() is teller for _, known in self._served.copy().values()):
            return
        with self._lock:
            number = next(free for free in range(1, len(self._served) + 2) if free not in self._served)
            self._served[number] = f"{teller.kind}-{number}", weakref.ref(teller)
            try:
                if self.running is None:
                    self.running = self._start(self.tellers)
            except BaseException:
                del self._served[number]
                raise
        weakref.finalize(owner, self._remove, number, os.getpid())

    def tellers(self) -> list[tuple[str, Teller]]:
        """See Tellers."""
        found = [(name, known()) for name, known in self._served.copy().values()]
        return [(name, teller) for name, teller in found if teller is not None]

    def _remove(self, number: int, process: int) -> None:
        """A loader is gone. In a thread of ours, which others may wait for, nothing is waited for."""
        if process != os.getpid():
            return
        with self._lock:
            self._served.pop(number, None)
            if not self._served and self.running is not None:
                running, self.running = self.running, None
                running.close(wait=not OwnThread.is_current())

    def forget(self) -> None:
        """In a forked process: there are no loaders yet, and whoever held the lock is not here."""
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
