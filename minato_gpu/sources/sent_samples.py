"""The transfer of prepared samples from worker to worker, by way of the reader process.

It decides who prepares a sample (prepared_samples.py). The worker sends the sample as a blob, in a memory file, with
its checksum. The reader process stages it in memory that the workers of all loaders map; they copy it from there, and
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

_HEAD = struct.Struct("<qdqQ")
_SAMPLE, _CHECKSUM = 0, -1  # what a worker is asked for, in place of a number of bytes
_GONE = -1  # in place of a number of bytes


class SentSample(NamedTuple):
    """A worker's message about one sample."""

    number: int
    prepare_s: float = 0.0
    nbytes: int = _GONE  # there was no copy where one should have been
    checksum: int = 0
    why_not: str = ""  # no sample is to be shared any more, in words
    file: int = -1  # memory that holds it, the receiver's to close

    @property
    def is_gone(self) -> bool:
        """True if there was no copy where one should have been."""
        return self.nbytes == _GONE

    def fill(self, view: memoryview) -> None:
        """Copies what is in the file."""
        read_into(self.file, view, 0)


def ask(number: int) -> Place:
    """Returns the entry among a ticket's places that has its worker send the sample."""
    return ASKED, _SAMPLE, 0, PREPARED, number, None


def ask_checksum(number: int) -> Place:
    """Returns the entry among a ticket's places that has its worker send only the sample's checksum."""
    return ASKED, _CHECKSUM, 0, PREPARED, number, None


def place_of(number: int, block: int, nbytes: int, checksum: int) -> Place:
    """Returns the entry among a ticket's places that says where a copy of the sample is."""
    return block, nbytes, checksum, PREPARED, number, None


def send(end: socket.socket, asked: Place, prepare_s: float, pieces: Sequence[memoryview]) -> None:
    """Sends a sample, in pieces, as it was ``asked`` for. Raises OSError if the socket is full, or memory is short."""
    checksum = xxh3_64()
    for piece in pieces:
        checksum.update(piece)
    head = _HEAD.pack(asked[4], prepare_s, sum(map(len, pieces)), checksum.intdigest())
    if asked[1] == _CHECKSUM:
        end.send(head)
    else:
        messages.send_file(end, "sample", head, pieces)


def send_why_not(end: socket.socket, number: int, why_not: str = "") -> None:
    """Sends that no sample is to be shared, and why; without a reason, that this one's copy was gone."""
    end.send(_HEAD.pack(number, 0.0, _GONE, 0) + messages.reason(why_not))


def receive(end: socket.socket) -> SentSample | None:
    """Returns the next message; None if there is none yet.

    Raises OSError for an invalid message, and after all workers' end.
    """
    if (record := messages.receive_record(end, _HEAD)) is None:
        return None
    (number, prepare_s, nbytes, checksum), why_not, file = record
    if file >= 0:
        nbytes = os.fstat(file).st_size
    return SentSample(number, prepare_s, nbytes, checksum, why_not, file)


def copy(arena: Arena, place: Place) -> NDArray[np.uint8] | None:
    """Returns a copy of a sample's blob; None if it is not there any more."""
    block, nbytes, checksum = place[:3]
    data = np.empty(nbytes, np.uint8)
    data.data[:] = arena.buffer[block : block + nbytes]
    return data if xxh3_64_intdigest(data.data) == checksum else None
