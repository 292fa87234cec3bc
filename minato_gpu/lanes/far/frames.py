"""Frames through a socket that never blocks: a pickled head, and a body that is received where it is to be stored.

A frame is two lengths, a pickled tuple, and bytes. Both ends refuse lengths beyond a bound. A body of any size is sent
from where it is stored and received into the memory that ``place`` names, without a copy between; only what comes with
other small frames is copied once. Nothing is unpickled before both ends have proven that they know the token
(greeting.py).
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LENGTHS = struct.Struct("<QQ")  # of head and body
_MOST_HEAD, _MOST_BODY = 1 << 28, 1 << 40
_BUFFER = 1 << 16
_AT_ONCE = 64  # views of one system call

Place = Callable[[tuple[Any, ...], int], Sequence[memoryview] | None]
"""From a frame's head and the bytes of its body to where that is to go; None: nowhere."""


class FrameSocket:
    """One end of a connection. ``open``: until the other end has closed, or failed. ``heard``: when something last
    came. ``queued`` and ``sent``: bytes since the beginning. ``send`` and ``flush`` may be called by any thread."""

    def __init__(self, end: socket.socket, place: Place = lambda head, nbytes: None) -> None:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.end, self.open, self.heard = end, True, perf_counter()
        self.queued = self.sent = self.received = 0
        self._lock = threading.Lock()
        self._out: deque[memoryview] = deque()
        self._buffer, self._begin, self._end = memoryview(bytearray(_BUFFER)), 0, 0
        self._frames = self._read_frames(place)

    # --- sending -------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Bytes that wait for room in the socket."""
        return self.queued - self.sent

    def send(self, *head: Any, body: Sequence[memoryview] = ()) -> None:
        """Sends a frame, now or when there is room. ``body`` (bytes) must stay as it is until ``sent`` says so."""
        pickled = pickle.dumps(head, 5)
        views = [memoryview(_LENGTHS.pack(len(pickled), sum(map(len, body))) + pickled), *body]
        with self._lock:
            self._out.extend(view for view in views if len(view))
            self.queued += sum(map(len, views))
            self._flush()

    def flush(self) -> None:
        """Sends as much as there is room for."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        out = self._out
        try:
            while out and self.open:
                count = self.end.sendmsg(islice(out, _AT_ONCE))
                self.sent += count
                while out and count >= len(out[0]):
                    count -= len(out.popleft())
                if count:
                    out[0] = out[0][count:]
        except BlockingIOError:
            pass
        except OSError:
            self.open = False

    # --- receiving -----------------------------------------------------------------------------------------

    def receive(self) -> Iterator[tuple[Any, ...]]:
        """Yields the frames that have come, each once its body is stored in its place."""
        while self.open:
            try:
                head = next(self._frames)
            except (OSError, StopIteration):
                self.open = False
                return
            if head is None:
                return
            yield head

    def _read_frames(self, place: Place) -> Iterator[tuple[Any, ...] | None]:
        """Frames, and None wherever nothing more has come. Raises ConnectionError where they are none."""
        while True:
            lengths = bytearray(_LENGTHS.size)
            yield from self._read(memoryview(lengths))
            of_head, of_body = _LENGTHS.unpack(lengths)
            if of_head > _MOST_HEAD or of_body > _MOST_BODY:
                raise ConnectionError("no frame of ours is so long")
            pickled = bytearray(of_head)
            yield from self._read(memoryview(pickled))
            head = pickle.loads(pickled)
            views = place(head, of_body) if of_body else ()
            if views is None or sum(map(len, views)) != of_body:
                views = [memoryview(bytearray(of_body))]
            for view in views:
                yield from self._read(view)
            yield head

    def _read(self, view: memoryview) -> Iterator[None]:
        while len(view):
            if self._begin < self._end:
                count = min(len(view), self._end - self._begin)
                view[:count] = self._buffer[self._begin : self._begin + count]
                self._begin += count
                view = view[count:]
                continue
            direct = len(view) >= _BUFFER
            try:
                count = self.end.recv_into(view if direct else self._buffer)
            except BlockingIOError:
                yield None
                continue
            if not count:
                raise ConnectionError("the other end has closed")
            self.heard = perf_counter()
            self.received += count
            if direct:
                view = view[count:]
            else:
                self._begin, self._end = 0, count

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self.open = False
        self.end.close()


# --- what both ends make of a task's rows ------------------------------------------------------------------


def between(sizes: Sequence[int], first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Samples number ``first`` to ``stop`` of a task whose pieces have these sizes: piece, and its part from where to
    where."""
    for number, size in enumerate(sizes):
        if first < size and stop > 0:
            yield number, max(first, 0), min(stop, size)
        first, stop = first - size, stop - size


def bytes_of_rows(views: Sequence[NDArray[Any] | None], begin: int, end: int) -> list[memoryview]:
    """The bytes of these rows of a slab, leaf by leaf."""
    return [view[begin:end].reshape(-1).view(np.uint8).data for view in views if view is not None and view.nbytes]
