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

from minato_gpu.sources import parcels
from minato_gpu.sources.disk.filesystem import read_into

_HEAD = struct.Struct("<qdd")
_ROOM = 1 << 12  # bytes of the socket's buffer: some ten messages


class Received(NamedTuple):
    """Fields of a sample: what they save, of what it takes to prepare (seconds); and the memory ``file`` that has
    them, so many bytes, which is the caller's to close; -1 where no descriptor was free."""

    sample: int
    saved_s: float
    prepare_s: float
    file: int
    nbytes: int

    def fill(self, view: memoryview) -> None:
        """Copy them to ``view``, of ``nbytes`` bytes."""
        read_into(self.file, view, 0)


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
        parcels.send_file(end, "fields", _HEAD.pack(sample, saved_s, prepare_s), buffers)
    except OSError:  # descriptors or memory are short, the socket is full, or the reader has ended
        return False
    return True


def receive(end: socket.socket) -> Received | None:
    """What has come next; None where nothing has. Raises ConnectionError once all workers have ended."""
    try:
        data, file = parcels.receive(end, _HEAD.size)
    except BlockingIOError:
        return None
    sample, saved_s, prepare_s = _HEAD.unpack(data)
    return Received(sample, saved_s, prepare_s, file, os.fstat(file).st_size if file >= 0 else 0)
