"""What the index holds, as bytes and back; pure.

LMDB has no checksums of its own, so each value ends with one of its key and itself (``seal``): a value that a damaged
disk has changed is noticed, and never believed.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from minato_gpu.caching.orders import Part

LONGEST_KEY = 511  # bytes: LMDB's own limit
LONGEST_VERSION = 1024
_ENTRY = struct.Struct("<QQQQdd")
_SEGMENT = struct.Struct("<qqqq?")
_PLACE = struct.Struct(">QQ")
_NUMBER = struct.Struct("<q")
_RUN = struct.Struct("<QQQddddq")
_PART = struct.Struct("<16sqq")
_SEAL = struct.Struct("<I")

Place = tuple[int, int]  # a segment's number, and the offset in its file


class DamagedIndexError(Exception):
    """A record of the index is not what was written."""


class Entry(NamedTuple):
    """A copy that is kept: ``length`` bytes of the segment file from ``offset`` on, which have this ``checksum``
    (XXH3).

    ``cost_s``: what it cost to get the bytes, in seconds, as who wrote them said. ``used_at``: when it was written, or
    used since, in seconds since 1970; coarse, see runs.py.
    """

    key: bytes
    version: bytes
    segment: int
    offset: int
    length: int
    checksum: int
    cost_s: float
    used_at: float


class Segment(NamedTuple):
    """The account of a segment file, in bytes, all of them multiples of the block.

    ``top``: how far its writer may write; that is charged already. ``end``: how far entries have been written.
    ``live``: of these, what entries hold. ``doomed``: what is no entry any more, and is not free on disk yet.
    ``full``: nobody writes to it any more.
    """

    top: int = 0
    end: int = 0
    live: int = 0
    doomed: int = 0
    full: bool = False


class Run(NamedTuple):
    """A loader that reads by the tier, in one process: ``pid`` in a ``namespace``, ``born`` at that clock tick.

    Times are in seconds since 1970: ``began``, and ``epoch_at`` its current epoch (0: none yet); copies that have been
    used from ``since`` on are of use to it (0: any may be, as its first epoch goes on); ``heard``: when it said so
    last. ``budget``: the bytes that it may take. ``part``: what it reads in this epoch, None where it does not say.
    """

    namespace: int
    pid: int
    born: int
    began: float
    epoch_at: float
    since: float
    heard: float
    budget: int
    part: Part | None = None


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


def pack_entry(entry: Entry) -> bytes:
    """The value of an entry, which is stored under its key."""
    return seal(entry.key, _ENTRY.pack(*entry[2:]) + entry.version)


def unpack_entry(key: bytes, value: bytes) -> Entry:
    """The entry. Raises DamagedIndexError."""
    body = unseal(key, value)
    return Entry(key, body[_ENTRY.size :], *_ENTRY.unpack_from(body))


def pack_segment(key: bytes, segment: Segment) -> bytes:
    """The value of a segment's account."""
    return seal(key, _SEGMENT.pack(*segment))


def unpack_segment(key: bytes, value: bytes) -> Segment:
    """The account. Raises DamagedIndexError."""
    return Segment(*_SEGMENT.unpack(unseal(key, value)))


def pack_number(key: bytes, number: int) -> bytes:
    """The value of a number."""
    return seal(key, _NUMBER.pack(number))


def unpack_number(key: bytes, value: bytes) -> int:
    """The number. Raises DamagedIndexError."""
    return int(_NUMBER.unpack(unseal(key, value))[0])


def pack_run(key: bytes, run: Run) -> bytes:
    """The value of a run."""
    return seal(key, _RUN.pack(*run[:-1]) + (b"" if run.part is None else _PART.pack(*run.part)))


def unpack_run(key: bytes, value: bytes) -> Run:
    """The run. Raises DamagedIndexError."""
    body = unseal(key, value)
    part = Part(*_PART.unpack_from(body, _RUN.size)) if len(body) > _RUN.size else None
    return Run(*_RUN.unpack_from(body))._replace(part=part)


def segment_key(number: int) -> bytes:
    """The key of a segment's account."""
    return number.to_bytes(8, "big")


def place_key(place: Place) -> bytes:
    """The key of space that is to be freed; it begins with that of its segment's account."""
    return _PLACE.pack(*place)


def key_place(key: bytes) -> Place:
    """And back."""
    segment, offset = _PLACE.unpack(key)
    return segment, offset


def allotted(length: int, block: int) -> int:
    """What ``length`` bytes take in a segment: whole blocks, since only those can be freed, and at least one."""
    return max(-(-length // block), 1) * block
