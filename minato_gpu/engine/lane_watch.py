"""Waits for lanes that do not ring the workers' bell, and for the reader process: their descriptors, watched
together."""

from __future__ import annotations

import select
from collections.abc import Iterable, Sequence
from contextlib import suppress

from minato_gpu.lanes.contract import Lane


class LaneWatch:
    """Watches the descriptors of lanes that do not ring the workers' bell, and ``more`` descriptors, for one thread.

    Each is watched until it has been readable once; then ``arm`` asks for more. So a lane that speaks while nobody
    wants to hear it wakes nobody twice. Lanes are asked for their descriptors every time, which may have changed.
    """

    def __init__(self, lanes: Iterable[Lane], more: Sequence[int] = ()) -> None:
        self._lanes = [lane for lane in lanes if not lane.rings]
        self._more = more  # descriptors besides
        self.any = bool(self._lanes or more)  # read where a call would count
        self._epoll = select.epoll() if self.any else None

    def fileno(self) -> int:
        """Returns a descriptor that is readable once a lane has something to report. Only if there is ``any``."""
        assert self._epoll is not None
        return self._epoll.fileno()

    def spoke(self) -> bool:
        """Returns whether any of the descriptors has become readable; such are not watched any more until ``arm``."""
        return self._epoll is not None and bool(self._epoll.poll(0))

    def arm(self, names: Iterable[str] | None = None) -> None:
        """Watches again: everything, or the lanes in ``names`` only. What has come meanwhile is noticed at once."""
        if self._epoll is None:
            return
        for fd in self._more if names is None else ():
            self._watch(self._epoll, fd)
        for lane in self._lanes:
            for fd in lane.fds() if names is None or lane.name in names else ():
                self._watch(self._epoll, fd)

    @staticmethod
    def _watch(epoll: select.epoll, fd: int) -> None:
        mask = select.EPOLLIN | select.EPOLLONESHOT
        try:
            epoll.modify(fd, mask)
        except FileNotFoundError:
            with suppress(OSError):  # closed meanwhile
                epoll.register(fd, mask)

    def close(self) -> None:
        """Stops watching."""
        if self._epoll is not None:
            self._epoll.close()
