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
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_LENGTHS = struct.Struct("<QQ")  # of head and body
_MOST_HEAD, _MOST_BODY = 1 << 34, 1 << 40
_TOGETHER = 1 << 16  # bytes of a frame that is sent by one call

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
                    self.end.sendall(part)
            except OSError:
                self.shut()

    def receive(self, place: Place = lambda head: None) -> tuple[Any, ...]:
        """Returns the next frame's head, once its body is stored. Raises OSError where the connection has ended."""
        of_head, of_body = _LENGTHS.unpack(self.read(_LENGTHS.size))
        if of_head > _MOST_HEAD or of_body > _MOST_BODY:
            raise ConnectionError("no frame of ours is so long")
        head: tuple[Any, ...] = pickle.loads(self.read(of_head))
        views = place(head) if of_body else ()
        if views is None or sum(map(len, views)) != of_body:
            self.read(of_body)
        else:
            for view in views:
                self._fill(view)
        self.received += of_body
        return head

    def read(self, count: int) -> bytes:
        """Returns the next ``count`` bytes, outside of any frame. Raises OSError where the connection has ended."""
        found = bytearray(count)
        self._fill(memoryview(found))
        return bytes(found)

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
        """Shuts and closes the socket; no thread may use it any more. Idempotent."""
        self.shut()
        self._file.close()
        self.end.close()
