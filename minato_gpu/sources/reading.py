"""Reading of a sample's bytes by its data set: from what has been read ahead for it, or from storage itself.

The loader's reader process stores bytes in shared memory (blocks.py) before it lets a worker have the sample, and
the worker puts at hand where they are stored. ``read_bytes`` copies them from there, about 10 microseconds for 100 KB:
the array is the caller's own, so that a stage that works in place spoils nothing, and the memory is free for the next.
What is not at hand is read from storage, with the same result, and counted.

Rejected: views of the shared memory. A data set that keeps one would see it change.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from minato_gpu.memory.arena import Arena
from minato_gpu.sources import blocks, page_cache
from minato_gpu.sources.disk.filesystem import read_into, read_to_end, tells_size
from minato_gpu.sources.remote import check_length, read_here
from minato_gpu.sources.source import FIELDS, PREPARED, Key, Source

Place = tuple[int, int, int, str, int, int | None] | tuple[int, int, int, str, int, int | None, str]
"""The place of a source's bytes: a block of the arena (see blocks.py), or IN_PAGE_CACHE; the number of bytes;
the block's stamp; and the source's key. A plain tuple, flat: quick to pickle. With ASKED for a block it is no place:
the worker is asked for fields, or for what sent_samples.py says. A prepared sample's has a checksum for a stamp."""


class AtHand(threading.local):
    """The places of the bytes read ahead for the sample that this thread prepares."""

    arena: Arena | None = None  # arena that holds them; None where no loader reads ahead
    keeps_fields = False  # whether there may be kept fields
    shares = False  # whether there may be samples that other loaders have prepared
    direct = 0  # reads from storage while a loader reads ahead
    direct_s = 0.0  # seconds that these took

    def __init__(self) -> None:
        self._places: dict[Key, tuple[int, int, int]] = {}
        self.fields: Place | None = None  # kept ones of the sample, or that it is asked for them
        self.prepared: Place | None = None  # a copy of the sample, or that it is asked for one

    def put(self, places: Iterable[Place]) -> None:
        """Sets the places for the next sample, or for samples that are fetched by one call, instead of the last ones.
        Kept fields and prepared samples are found only for a sample by itself."""
        self._places = {place[3:]: place[:3] for place in places}
        self.fields = None
        if self.keeps_fields:
            self.fields = next((place for place in places if place[3] == FIELDS), None)
        if self.shares:
            self.prepared = next((place for place in places if place[3] == PREPARED), None)

    def find(self, source: Source) -> NDArray[np.uint8] | None:
        """Returns a copy of the source's bytes; None if they are not ready (any more)."""
        place = self._places.get(source.key)
        if place is None:
            return None
        block, nbytes, stamp = place
        if block == blocks.IN_PAGE_CACHE:
            return page_cache.read(source, nbytes)
        assert self.arena is not None
        return blocks.copy(self.arena, block, nbytes, stamp)

    @property
    def asked_for(self) -> int:
        """The index of the sample whose fields the worker is to send; -1: none."""
        return -1 if self.fields is None or self.fields[0] != blocks.ASKED else self.fields[4]

    def find_fields(self) -> NDArray[np.uint8] | None:
        """Returns a copy of the sample's kept fields; None if they are not there (any more). Not to be called if the
        worker is ``asked_for`` them."""
        place = self.fields
        return None if place is None or self.arena is None else blocks.copy(self.arena, *place[:3])


AT_HAND = AtHand()


def read_bytes(source: str | os.PathLike[str] | Source) -> NDArray[np.uint8]:
    """Returns the bytes of a source, or of a whole file: uint8 (n,), the caller's own.

    In a worker of a loader that reads ahead they are at hand already, if ``source`` is what the data set's
    ``source(key)`` said.

    Args:
        source: what to read, or the path of a file.

    Raises:
        OSError: a file cannot be read, or a server sends more than the part that is asked for; for a URL also what
            fsspec raises, whatever its type.
        EOFError: a source ends too early.
    """
    if not isinstance(source, Source):
        source = Source(os.fspath(source))
    if AT_HAND.arena is None:
        return read_now(source)
    found = AT_HAND.find(source)
    if found is None:
        begin = perf_counter()
        found = read_now(source)
        AT_HAND.direct += 1
        AT_HAND.direct_s += perf_counter() - begin
    return found


def read_now(source: Source) -> NDArray[np.uint8]:
    """Returns the bytes of a source, read from storage, and raises as ``read_bytes``."""
    if source.is_remote:
        data = _read_remote(source)
    else:
        data = _read_file(source.file, source.offset, source.length)
    check_length(source, len(data))
    return data


def _read_file(path: str, offset: int, length: int | None) -> NDArray[np.uint8]:
    """Reads a file. NumPy's ``fromfile`` takes 25 microseconds more."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if tells_size(found):
            rest = max(0, found.st_size - offset)
            nbytes = rest if length is None else min(length, rest)
        elif length is None:
            return np.frombuffer(read_to_end(file, offset), np.uint8).copy()
        else:
            nbytes = length
        data = np.empty(nbytes, np.uint8)
        return data[: read_into(file, data.data, offset)]
    finally:
        os.close(file)


def _read_remote(source: Source) -> NDArray[np.uint8]:
    if source.length == 0:  # as in RemoteReads
        return np.empty(0, np.uint8)
    return np.frombuffer(read_here(source), np.uint8).copy()
