"""How a worker sends fields to the reader process: in a memory file of their own, by a socket that all workers share.

It never waits: where the socket is full, or descriptors are short, the fields are not kept. So few are under way at a
time that their memory is of no account.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from minato_gpu.sources.memory_file import fill, memory_file

_HEAD = struct.Struct("<qdd")
_ROOM = 1 << 12  # bytes of the socket's buffer: some ten messages


class Received(NamedTuple):
    """Fields of a sample: what they save, of what it takes to prepare (seconds); and the memory ``file`` that has
    them, so many bytes, which is the caller's to close."""

    sample: int
    saved_s: float
    prepare_s: float
    file: int
    nbytes: int

    def fill(self, view: memoryview) -> None:
        """Copy them to ``view``, of ``nbytes`` bytes."""
        fill(self.file, view)


def pair() -> tuple[socket.socket, socket.socket]:
    """The reader's end, and that of all workers."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    for end in ends:
        end.setblocking(False)
    return ends


def send(
    end: socket.socket, sample: int, buffers: Sequence[bytes | memoryview], saved_s: float, prepare_s: float
) -> bool:
    """Whether they are under way."""
    try:
        with memory_file("fields", buffers) as file:
            socket.send_fds(end, [_HEAD.pack(sample, saved_s, prepare_s)], [file])
    except OSError:  # descriptors or memory are short, the socket is full, or the reader has ended
        return False
    return True


def receive(end: socket.socket) -> Received | None:
    """What has come next; None where nothing has. Raises ConnectionError once all workers have ended."""
    try:
        data, files, _, _ = socket.recv_fds(end, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    if not data:
        raise ConnectionError("all workers have ended")
    sample, saved_s, prepare_s = _HEAD.unpack(data)
    if not files:  # no descriptor was free
        return Received(sample, saved_s, prepare_s, -1, 0)
    return Received(sample, saved_s, prepare_s, files[0], os.fstat(files[0]).st_size)
