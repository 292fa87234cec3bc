"""Messages between the training process and its reader process, through a socket that keeps them apart.

A message is taken whole or not at all, and nobody waits for the other side. The kernel says how large one may be (some
200 KB, unless configured otherwise). What is larger goes along as a file in memory, which has no name, and is gone once
it has been read.

Rejected: ``multiprocessing.connection``. Its ``send_bytes`` waits until all is written: a reader process that stopped
would stop the training loop, and two sides that both have much to say would wait for each other.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from minato_gpu.sources.disk.filesystem import read_into

LARGEST = 64 << 10  # bytes of a message that goes as it is
SOCKET_BYTES = 2 << 20  # bytes of a socket's buffer, if the kernel allows so many
_ELSEWHERE = b"\0"  # a message of this alone says that it is in a file
_AT_ONCE = 512  # buffers of one system call


class MessageSocket:
    """Sends and receives objects, whole and in order, with the process at the other side of ``end``."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self._unsent: deque[bytes] = deque()

    def put(self, what: object) -> None:
        """Pickles an object now, and queues it for ``flush``."""
        self._unsent.append(pickle.dumps(what, 5))

    def flush(self) -> bool:
        """Sends what is queued. Returns False if there is no room for all of it, as the other side is busy.

        Raises OSError if the other side has closed, or neither memory nor a descriptor is free for a large message.
        """
        with suppress(BlockingIOError):
            while self._unsent:
                data = self._unsent[0]
                if len(data) <= LARGEST:
                    self.end.send(data)
                else:
                    send_file(self.end, "message", _ELSEWHERE, [data])
                self._unsent.popleft()
        return not self._unsent

    def receive(self) -> list[Any]:
        """Returns what has arrived; [] if nothing has yet.

        Raises OSError if nothing has, nor ever will: the other side has closed, or what came was no message.
        """
        found: list[Any] = []
        try:
            while True:
                found.append(self._next())
        except BlockingIOError:
            pass
        except OSError:
            if not found:
                raise
        return found

    def _next(self) -> Any:
        data, file = receive(self.end, LARGEST)
        try:
            if data == _ELSEWHERE and file >= 0:
                whole = bytearray(os.fstat(file).st_size)
                read_into(file, memoryview(whole), 0)
                return pickle.loads(whole)
            return pickle.loads(data)  # of the marker alone, no descriptor was free: it is no message
        except Exception as error:
            self.end.shutdown(socket.SHUT_RDWR)  # without what is lost there is no going on
            raise OSError(f"no message, or no descriptor was free for one ({error})") from error
        finally:
            if file >= 0:
                os.close(file)


def send_file(end: socket.socket, name: str, head: bytes, buffers: Sequence[bytes | memoryview]) -> None:
    """Sends ``head``, and with it a file in memory that holds these buffers one after the other.

    Raises BlockingIOError, with nothing sent, if the socket has no room, else OSError.
    """
    file = os.memfd_create(f"minato-{name}", os.MFD_CLOEXEC)
    try:
        for at in range(0, len(buffers), _AT_ONCE):
            views = [memoryview(each).cast("B") for each in buffers[at : at + _AT_ONCE] if len(each)]
            while views:
                done = os.writev(file, views)
                while views and done >= len(views[0]):
                    done -= len(views.pop(0))
                if views:
                    views[0] = views[0][done:]
        socket.send_fds(end, [head], [file])
    finally:
        os.close(file)


def receive(end: socket.socket, most: int) -> tuple[bytes, int]:
    """Returns the next message, of ``most`` bytes at most, and the file that came with it, for the caller to close
    (-1: none). Raises BlockingIOError if there is none yet, ConnectionError if the other side has closed."""
    data, files, _, _ = socket.recv_fds(end, most, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionError("the other side has ended")
    return data, files[0] if files else -1
