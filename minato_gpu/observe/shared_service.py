"""What a process has once for all its loaders: it begins with the first, and ends with the last, or when Python ends.

A forked process has none of its parent's: the descriptors are closed in it before anything else runs, so that no worker
holds a listening socket, and nobody answers for its parent. It begins its own with a loader that it iterates itself.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

from minato_gpu.notices import LOGGER
from minato_gpu.observe.counting import Counts
from minato_gpu.samples import JSON
from minato_gpu.threads import OwnThread


class Told(NamedTuple):
    """``stats`` of epoch number ``epoch``; ``ended``: what was counted before it, where somebody wants that."""

    epoch: int
    stats: dict[str, JSON]
    ended: Counts


class Teller(Protocol):
    """A loader, as it is watched: ``kind``, a word for what it loads. Asked by any thread."""

    kind: str

    def told(self) -> Told | None:
        """How it stands; None before its first epoch."""


Tellers = Callable[[], list[tuple[str, Teller]]]
"""Those that live, with names: what they load, and the smallest number that was free when they came."""


class Door:
    """A thread that sleeps at a listening socket until somebody knocks: nothing in it is periodic.

    ``answer`` is called, in the thread, when the descriptor ``fd`` is readable; what it raises is logged. ``leave``
    closes the socket, once nobody sleeps there any more; who makes a door does where that raises.
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
        """End the thread; ``wait`` until it has let go of the socket."""
        os.eventfd_write(self._wake, 1)
        if wait:
            self._thread.join()

    def abandon(self) -> None:
        """Let go of all descriptors; in a forked process, which does not have the thread, of what was inherited."""
        os.close(self._wake)
        self._leave()


class SharedService:
    """``start`` is called for the first loader, with what tells of those that live; raises what ``add`` is to raise."""

    def __init__(self, start: Callable[[Tellers], Door]) -> None:
        self._start = start
        self._lock = threading.RLock()  # the collector may end a loader while this thread holds it
        self._served: dict[int, tuple[str, weakref.ref[Teller]]] = {}
        self.running: Door | None = None
        _services.append(self)

    def add(self, teller: Teller) -> None:
        """Serve it until it is gone. Nothing changes where it is served already."""
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
        weakref.finalize(teller, self._remove, number, os.getpid())

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
