"""Samples, or fields of samples, that workers send the reader process, by a socket that all workers of a loader share.

A sample is a blob in a memory file of its own. Workers never wait: where the socket is full, or descriptors are short,
nothing is sent. So few are under way at a time that their memory is of no account.

Fields stay in the tier in memory (fields.py). A whole sample is for other loaders (prepared_samples.py), and comes with
its checksum: the reader process stages it in memory that the workers of all loaders map; they copy it from there, and
compare the checksum of what they have copied: the block may have become another sample's meanwhile.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from minato_gpu.memory.arena import Arena
from minato_gpu.sources import messages
from minato_gpu.sources.blocks import ASKED
from minato_gpu.sources.disk.filesystem import read_into
from minato_gpu.sources.reading import Place
from minato_gpu.sources.source import PREPARED

_HEAD = struct.Struct("<qddQq")
_TEXT = 500  # bytes of a reason
_ROOM = 1 << 12  # bytes of the socket's buffer: some ten messages
_SAMPLE, _CHECKSUM = 0, -1  # what a worker is asked for, in place of a number of bytes
_GONE = -1  # in place of a number of bytes


class SentSample(NamedTuple):
    """A worker's message about one sample."""

    number: int  # its index in the data set; of a whole sample the number in its key (source.prepared_key)
    prepare_s: float = 0.0
    saved_s: float = 0.0  # seconds of these that its fields save
    checksum: int = 0  # of a whole sample
    nbytes: int = _GONE  # bytes of what was made; _GONE: nothing was sent, see ``is_gone``
    why_not: str = ""  # nothing is sent of it, in words; of a whole sample: nor will be of any other
    file: int = -1  # memory that holds it, the receiver's to close; -1: nothing came but this message

    @property
    def is_gone(self) -> bool:
        """True for a message with neither bytes nor checksum. Unless ``why_not`` gives a reason, the worker found no
        copy of a whole sample where one was said to be."""
        return self.nbytes == _GONE

    def fill(self, view: memoryview) -> None:
        """Copies the file's bytes into ``view``."""
        read_into(self.file, view, 0)


def pair(room: int = _ROOM) -> tuple[socket.socket, socket.socket]:
    """Returns the ends of the reader process and of all workers, which never block. ``room``: bytes of the buffer."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
    for end in ends:
        end.setblocking(False)
    return ends


def send(end: socket.socket, sent: SentSample, pieces: Sequence[bytes | memoryview] | None = None) -> None:
    """Sends a message, and the ``pieces`` of a sample, if any. Raises OSError if the socket is full or memory short."""
    *numbers, why_not, _ = sent
    head = _HEAD.pack(*numbers) + why_not.encode("utf-8", "replace")[:_TEXT]
    if pieces is None:
        end.send(head)
    else:
        messages.send_file(end, "sample", head, pieces)


def receive(end: socket.socket) -> SentSample | None:
    """Returns the next message; None if there is none yet.

    Raises OSError for an invalid message, and once all workers' ends are closed.
    """
    try:
        data, file = messages.receive(end, _HEAD.size + _TEXT)
    except BlockingIOError:
        return None
    if len(data) < _HEAD.size:
        if file >= 0:
            os.close(file)
        raise ConnectionError("invalid message")
    number, prepare_s, saved_s, checksum, nbytes = _HEAD.unpack_from(data)
    nbytes = os.fstat(file).st_size if file >= 0 else nbytes
    why_not = data[_HEAD.size :].decode("utf-8", "replace")
    return SentSample(number, prepare_s, saved_s, checksum, nbytes, why_not, file)


# --- samples for other loaders ---------------------------------------------------------------------------------------


def ask(number: int) -> Place:
    """Returns the entry among a ticket's places that has its worker send the sample."""
    return ASKED, _SAMPLE, 0, PREPARED, number, None


def ask_checksum(number: int) -> Place:
    """Returns the entry among a ticket's places that has its worker send only the sample's checksum."""
    return ASKED, _CHECKSUM, 0, PREPARED, number, None


def place_of(number: int, block: int, nbytes: int, checksum: int) -> Place:
    """Returns the entry among a ticket's places that says where a copy of the sample is."""
    return block, nbytes, checksum, PREPARED, number, None


def is_copy(places: Sequence[Place]) -> bool:
    """Returns whether a ticket's places say where a copy of its sample is."""
    return any(place[3] == PREPARED and place[0] != ASKED for place in places)


def send_asked(end: socket.socket, asked: Place, prepare_s: float, pieces: Sequence[memoryview]) -> None:
    """Sends a sample, in pieces, or only its checksum, as ``asked`` says (``ask``, ``ask_checksum``). Raises as
    ``send``."""
    checksum = xxh3_64()
    for piece in pieces:
        checksum.update(piece)
    sent = SentSample(asked[4], prepare_s, checksum=checksum.intdigest(), nbytes=sum(map(len, pieces)))
    send(end, sent, None if asked[1] == _CHECKSUM else pieces)


def copy(arena: Arena, place: Place) -> NDArray[np.uint8] | None:
    """Returns a copy of a sample's blob; None if it is not there any more."""
    block, nbytes, checksum = place[:3]
    data = np.empty(nbytes, np.uint8)
    data.data[:] = arena.buffer[block : block + nbytes]
    return data if xxh3_64_intdigest(data.data) == checksum else None
