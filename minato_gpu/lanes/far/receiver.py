"""The thread in which a loader's far lanes receive: one for all nodes, which also notices those that are silent."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from minato_gpu.lanes.far.frames import FrameSocket
from minato_gpu.util.threads import OwnThread

_LOOK_S = 0.1  # between two looks at what is silent
_LATE_S = 0.5  # this thread has had no turn for so long: what is silent may have spoken


class Connected(Protocol):
    """A lane, as the thread sees it: all of this is called in the thread."""

    left: threading.Event

    def begin(self, wire: FrameSocket) -> None:
        """Takes up a new connection."""

    def take_in(self) -> bool:
        """Takes in what has come; returns whether there may be more."""

    def fail(self, why: object) -> None:
        """Gives the node up for good."""

    def attend(self, now: float, *, late: bool) -> bool:
        """Returns whether the node is alive. ``late``: the thread had no turn for a while, silence is forgiven."""

    def fileno(self) -> int:
        """Returns the connection's descriptor."""

    @property
    def wants(self) -> int:
        """Epoll events to wait for."""

    def lose(self) -> None:
        """Drops the connection: the node is gone, or nothing is to be received any more."""


class Receiver:
    """The thread in which the lanes of one loader receive; it ends when the last of them has left."""

    def __init__(self) -> None:
        self._poll, self._bell = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._bell, select.EPOLLIN)
        self._lanes: dict[Connected, int] = {}  # that are connected, and what is watched of them
        self._members: set[Connected] = set()
        self._due: deque[Callable[[], None]] = deque()
        self._lock, self._has_ended = threading.Lock(), False
        self._thread = OwnThread(target=self._run, name="minato-far", daemon=True)

    def join(self, lane: Connected) -> None:
        """The lane will be connected, perhaps; in the thread that opens lanes."""
        self._members.add(lane)
        if self._thread.ident is None:
            self._thread.start()

    def post(self, call: Callable[[], None]) -> bool:
        """Has this called in the thread; returns whether it will be."""
        with self._lock:
            if not self._has_ended:
                self._due.append(call)
                os.eventfd_write(self._bell, 1)
            return not self._has_ended

    def add(self, lane: Connected, wire: FrameSocket) -> None:
        """In the thread: the lane's node is connected."""
        if lane not in self._members:
            wire.close()
            return
        lane.begin(wire)
        self._poll.register(wire.end, select.EPOLLIN)
        self._lanes[lane] = select.EPOLLIN

    def leave(self, lane: Connected) -> None:
        """In the thread: nothing more is received for this lane."""
        self._members.discard(lane)
        if lane in self._lanes:
            self._lose(lane)
        lane.left.set()

    def _lose(self, lane: Connected) -> None:
        del self._lanes[lane]
        lane.lose()  # which closes the connection, and with it the watch

    def _run(self) -> None:
        again, before, begun = False, perf_counter(), False
        while self._members or not begun:
            ready = {fd for fd, _ in self._poll.poll(0 if again else _LOOK_S)}
            if self._bell in ready:
                os.eventfd_read(self._bell)
            while self._due:
                begun = True
                self._due.popleft()()
            now, again = perf_counter(), False
            for lane, watched in list(self._lanes.items()):
                try:
                    again |= lane.take_in()
                except Exception as error:  # this thread must live: it receives for the others, too
                    lane.fail(repr(error))
                    self._lose(lane)
                    continue
                if not lane.attend(perf_counter(), late=now > before + _LATE_S):
                    self._lose(lane)
                elif lane.wants != watched:
                    self._lanes[lane] = lane.wants
                    self._poll.modify(lane.fileno(), lane.wants)
            before = now
        with self._lock:
            self._has_ended = True
        for call in self._due:
            call()
        self._poll.close()
        os.close(self._bell)
