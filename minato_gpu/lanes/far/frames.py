"""Frames through a TCP connection: a pickled head, and a body that is received where it is to be stored.

A frame is two lengths, a pickled tuple, and bytes. Both ends refuse lengths beyond a bound. A long body is sent from
where it is stored and received into the memory that ``place`` names, without a copy between. Nothing is unpickled
before both ends have proven that they know the token (greeting.py).
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

_LENGTHS = struct.Struct("<QQ")  # of head and body
_MOST_HEAD, _MOST_BODY = 1 << 34, 1 << 40
_TOGETHER = 1 << 16  # bytes of a frame that is sent by one call
_PIECE = 1 << 20  # bytes that are sent, or dropped, by one call: a socket's time limit is for each

Place = Callable[[tuple[Any, ...]], Sequence[memoryview] | None]
"""A function from a frame's head to the memory for its body; None: the body is dropped."""


class FrameSocket:
    """One end of a connection that carries frames. Any thread may send; one receives.

    ``received``: bytes of bodies. ``buffer``: bytes that may be read ahead of a frame's end (0: a descriptor that is
    not readable has no frame).
    """

    def __init__(self, end: socket.socket, buffer: int = 0) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.end, self.received = end, 0
        self._file: Any = end.makefile("rb", buffer)
        self._lock = threading.Lock()

    def send(self, *head: Any, body: Sequence[memoryview] = ()) -> None:
        """Sends a frame. If that fails the connection is shut, so that the receiving thread sees its end."""
        pickled = pickle.dumps(head, 5)
        of_body = sum(map(len, body))
        parts: list[bytes | memoryview] = [_LENGTHS.pack(len(pickled), of_body) + pickled, *body]
        with self._lock:
            try:
                for part in parts if of_body > _TOGETHER else [b"".join(parts)]:
                    view = memoryview(part)
                    for at in range(0, len(view), _PIECE):
                        self.end.sendall(view[at : at + _PIECE])
            except OSError:
                self.shut()

    def receive(self, place: Place = lambda head: None) -> tuple[Any, ...]:
        """Returns the next frame's head, once its body is stored or dropped.

        Raises OSError where the connection has ended, or a length is not what it must be.
        """
        of_head, of_body = _LENGTHS.unpack(self._filled(_LENGTHS.size))
        if of_head > _MOST_HEAD or of_body > _MOST_BODY:
            raise ConnectionError("no frame of ours is so long")
        head: tuple[Any, ...] = pickle.loads(self._filled(of_head))
        views: Iterable[memoryview] | None = place(head)
        if views is None:
            views = _nowhere(of_body)
        elif sum(map(len, views)) != of_body:
            raise ConnectionError(f"{of_body} bytes came for memory of another size")
        for view in views:
            self._fill(view)
        self.received += of_body
        return head

    def read(self, count: int) -> bytes:
        """Returns the next ``count`` bytes, outside of any frame. Raises OSError where the connection has ended."""
        return bytes(self._filled(count))

    def _filled(self, count: int) -> bytearray:
        found = bytearray(count)
        self._fill(memoryview(found))
        return found

    def _fill(self, view: memoryview) -> None:
        while len(view):
            count = self._file.readinto(view)
            if not count:
                raise ConnectionError("the other end has closed")
            view = view[count:]

    def shut(self) -> None:
        """Ends the connection; threads that receive or send return."""
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shuts and closes the socket, once no thread sends. No thread may receive any more. Idempotent."""
        self.shut()
        with self._lock:  # the descriptor's number may be another file's from now on
            self._file.close()
            self.end.close()


def _nowhere(count: int) -> Iterator[memoryview]:
    """Yields memory of so many bytes, in pieces, for what is dropped."""
    dropped = memoryview(bytearray(min(count, _PIECE)))
    for at in range(0, count, _PIECE):
        yield dropped[: count - at]
