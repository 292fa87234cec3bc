"""A thread that sleeps at a listening socket until somebody knocks: nothing in it is periodic."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from minato_gpu.notices import LOGGER
from minato_gpu.threads import OwnThread


class Door:
    """``answer`` is called, in the thread, when the descriptor ``fd`` is readable; what it raises is logged."""

    def __init__(self, fd: int, answer: Callable[[], None], name: str) -> None:
        self._fd = fd
        self._answer = answer
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = OwnThread(target=self._attend, name=name, daemon=True)
        self._thread.start()

    def _attend(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            poll.poll()
            if self._closed:
                break
            try:
                self._answer()
            except OSError:
                LOGGER.debug("whoever asked how the loaders stand has gone", exc_info=True)
            except Exception:
                LOGGER.exception("how the loaders stand could not be told")

    def close(self, *, wait: bool, then: Callable[[], None]) -> None:
        """End the thread, and do ``then`` once it has let go of the descriptor; ``wait`` for that."""
        self._closed = True
        os.eventfd_write(self._wake, 1)
        if wait:
            self._ended(then)
        else:
            OwnThread(target=self._ended, args=(then,), name="minato-door-closing", daemon=True).start()

    def _ended(self, then: Callable[[], None]) -> None:
        self._thread.join()
        os.close(self._wake)
        then()

    def abandon(self) -> None:
        """In a forked process, which does not have the thread."""
        os.close(self._wake)
