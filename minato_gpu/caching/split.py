"""The division of a cache between raw bytes, which were read, and kept fields, which were made of them.

Raw bytes of a sample save its read. Kept fields (what its preparation makes before random draws) save that and a
part of its preparation, and are larger. Reading and preparing overlap, so an epoch takes as long as the longer of both:

    seconds a sample = max(read_s (1 - fields - raw), prepare_s - saved_s fields)

with ``fields`` and ``raw`` the shares of all samples that are kept as such, within the cache's bytes. Raw bytes of as
many others as there is room for are best for any ``fields``, so that is the one unknown. The seconds are straight
lines in it, and least where they bend: all of these places are tried.
"""

from __future__ import annotations

from typing import NamedTuple


class Means(NamedTuple):
    """Mean costs and sizes of a sample."""

    read_s: float  # seconds to read it
    prepare_s: float  # seconds to prepare it: a worker's seconds over the number of workers
    saved_s: float  # seconds of these that kept fields save
    raw_bytes: float  # bytes of what is read
    field_bytes: float  # bytes of kept fields


class Shares(NamedTuple):
    """The shares of all samples that are kept as fields, and as raw bytes."""

    fields: float
    raw: float


def seconds(means: Means, shares: Shares) -> float:
    """Returns the seconds that an epoch takes for each of its samples, with these shares kept."""
    return max(_read(means, shares), means.prepare_s - means.saved_s * shares.fields)


def split(means: Means, budget: float) -> Shares:
    """Returns the shares that make an epoch shortest. ``budget``: the cache's bytes for each sample of the set; sizes
    must be positive.

    Of several such shares, those that leave the least work, then those of the fewest bytes.
    """
    read_s, prepare_s, saved_s, raw_bytes, field_bytes = means
    spared_s = read_s / raw_bytes  # by a byte that is kept raw
    bends = [
        (budget - raw_bytes, field_bytes - raw_bytes),  # there is just room for all others
        (prepare_s - read_s + spared_s * budget, saved_s - read_s + spared_s * field_bytes),  # both take as long
    ]
    most = min(1.0, budget / field_bytes)
    tried = [0.0, most, *(max(0.0, min(above / below, most)) for above, below in bends if below)]
    raws = [min(1 - fields, (budget - fields * field_bytes) / raw_bytes) for fields in tried]
    every = [Shares(fields, max(0.0, raw)) for fields, raw in zip(tried, raws, strict=True)]
    return min(every, key=lambda shares: _rank(means, shares))


def _read(means: Means, shares: Shares) -> float:
    return means.read_s * (1 - shares.fields - shares.raw)


def _rank(means: Means, shares: Shares) -> tuple[float, float, float]:
    """Returns a key by which shares are compared: the least is best, and what differs by rounding alone is equal."""
    left = _read(means, shares) + means.prepare_s - means.saved_s * shares.fields
    nbytes = means.field_bytes * shares.fields + means.raw_bytes * shares.raw
    whole = means.read_s + means.prepare_s
    return round(seconds(means, shares) / whole, 9), round(left / whole, 9), nbytes
