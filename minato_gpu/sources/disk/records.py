"""What the index holds: records, each of which knows its key, as bytes and back; pure.

LMDB has no checksums of its own, so each value ends with one of its key and itself (``seal``): a value that a damaged
disk has changed is noticed, and never believed.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple, Protocol, Self

from minato_gpu.caching.orders import Part

LONGEST_KEY = 511  # bytes: LMDB's own limit
LONGEST_VERSION = 1024
_ENTRY = struct.Struct("<QQQQ8xd")  # between them, what the copy cost to get: nobody reads it any more
_SEGMENT = struct.Struct("<qqqq?")
_TOTAL = struct.Struct("<q")
_RUN = struct.Struct("<QQQddddq")
_PART = struct.Struct("<16sqq")
_SEAL = struct.Struct("<I")

Place = tuple[int, int]  # a segment's number, and the offset in its file


class DamagedIndexError(Exception):
    """A record of the index is not what was written."""


class Record(Protocol):
    """What a table of the index holds, under ``key``; ``pack`` makes bytes of all else of it."""

    @property
    def key(self) -> bytes: ...

    def pack(self) -> bytes: ...

    @classmethod
    def unpack(cls, key: bytes, body: bytes) -> Self: ...


class Entry(NamedTuple):
    """A copy that is kept: ``length`` bytes of the segment file from ``offset`` on, which have this ``checksum``
    (XXH3). ``used_at``: when it was written, or used since, in seconds since 1970; coarse, see runs.py.
    """

    key: bytes
    version: bytes
    segment: int
    offset: int
    length: int
    checksum: int
    used_at: float

    def pack(self) -> bytes:
        return _ENTRY.pack(*self[2:]) + self.version

    @classmethod
    def unpack(cls, key: bytes, body: bytes) -> Self:
        return cls(key, body[_ENTRY.size :], *_ENTRY.unpack_from(body))


class Segment(NamedTuple):
    """The account of a segment file, in bytes, all of them multiples of the block.

    ``top``: how far its writer may write; that is charged already. ``end``: how far entries have been written.
    ``live``: of these, what entries hold. ``doomed``: what is no entry any more, and is not free on disk yet.
    ``full``: nobody writes to it any more.
    """

    number: int
    top: int = 0
    end: int = 0
    live: int = 0
    doomed: int = 0
    full: bool = False

    @property
    def key(self) -> bytes:
        return self.number.to_bytes(8, "big")

    @property
    def charged(self) -> int:
        """What of it counts against the budget."""
        return self.top - self.end + self.live + self.doomed

    @property
    def is_over(self) -> bool:
        """Whether nobody needs its file any more."""
        return self.full and not self.live

    def pack(self) -> bytes:
        return _SEGMENT.pack(*self[1:])

    @classmethod
    def unpack(cls, key: bytes, body: bytes) -> Self:
        return cls(int.from_bytes(key, "big"), *_SEGMENT.unpack(body))


class Total(NamedTuple):
    """A number that all of the index has one of."""

    key: bytes
    number: int

    def pack(self) -> bytes:
        return _TOTAL.pack(self.number)

    @classmethod
    def unpack(cls, key: bytes, body: bytes) -> Self:
        return cls(key, *_TOTAL.unpack(body))


class Run(NamedTuple):
    """A loader that reads by the tier, in one process: ``pid`` in a ``namespace``, ``born`` at that clock tick.

    Times are in seconds since 1970: ``began``, and ``epoch_at`` its current epoch (0: none yet); copies that have been
    used from ``since`` on are of use to it (0: any may be, as its first epoch goes on); ``heard``: when it said so
    last. ``budget``: the bytes that it may take. ``part``: what it reads in this epoch, None where it does not say.
    """

    key: bytes
    namespace: int
    pid: int
    born: int
    began: float
    epoch_at: float
    since: float
    heard: float
    budget: int
    part: Part | None = None

    def pack(self) -> bytes:
        return _RUN.pack(*self[1:-1]) + (b"" if self.part is None else _PART.pack(*self.part))

    @classmethod
    def unpack(cls, key: bytes, body: bytes) -> Self:
        part = Part(*_PART.unpack_from(body, _RUN.size)) if len(body) > _RUN.size else None
        return cls(key, *_RUN.unpack_from(body))._replace(part=part)


class Room(NamedTuple):
    """Bytes that copies may take, of all processes together; how many copies there are, and about what they take."""

    nbytes: int
    copies: int
    taken: int


class Verified(NamedTuple):
    """``entries`` with ``nbytes`` have been read; ``corrupt`` of them were not what was written, and are gone."""

    entries: int
    nbytes: int
    corrupt: int


def seal(key: bytes, body: bytes) -> bytes:
    """The value to store for ``body``."""
    return body + _SEAL.pack(zlib.crc32(body, zlib.crc32(key)))


def unseal(key: bytes, value: bytes) -> bytes:
    """The body of a stored value. Raises DamagedIndexError where it is not what was stored under this key."""
    body = value[: -_SEAL.size]
    if not value.endswith(_SEAL.pack(zlib.crc32(body, zlib.crc32(key)))):
        raise DamagedIndexError(f"the index's record {key!r} is not what was written")
    return body


def allotted(length: int, block: int) -> int:
    """What ``length`` bytes take in a segment: whole blocks, since only those can be freed, and at least one."""
    return max(-(-length // block), 1) * block
