"""How a cache is shared out between what was read and what was made of it: raw bytes and kept fields.

Raw bytes of a sample save its read. Kept fields (what its preparation makes before anything is drawn) save that and a
part of its preparation, and are larger. Reading and preparing overlap, so an epoch takes as long as the longer of both:

    seconds a sample = max(read_s (1 - fields - raw), prepare_s - saved_s fields)

with ``fields`` and ``raw`` the shares of all samples that are kept as such, in as many bytes as there are. That is a
linear program in two unknowns, and its optimum lies where two of its lines meet: all of these are tried.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

_EXACT = 1e-9


class Means(NamedTuple):
    """Of one sample: the storage's seconds for it, those of preparing it (of all workers together, so a worker's
    seconds over the number of workers), those of them that its kept fields save, and the bytes of both."""

    read_s: float
    prepare_s: float
    saved_s: float
    raw_bytes: float
    field_bytes: float


class Shares(NamedTuple):
    """Of all samples: kept as fields, kept as raw bytes."""

    fields: float
    raw: float


def seconds(means: Means, shares: Shares) -> float:
    """What a sample takes, on average, in epochs in which so much is kept."""
    return max(_read(means, shares), means.prepare_s - means.saved_s * shares.fields)


def split(means: Means, budget: float, *, keeps_raw: bool = True) -> Shares:
    """The shares that make an epoch shortest; ``budget``: bytes for each sample of the set. Of several such shares
    those that leave the least to be done, then those of the fewest bytes. ``keeps_raw``: whether raw bytes are of use.
    """
    lines = [
        (1.0, 0.0, 0.0),
        (0.0, 1.0, 0.0),
        (1.0, 1.0, 1.0),
        (means.field_bytes, means.raw_bytes, budget),
        (means.saved_s - means.read_s, -means.read_s, means.prepare_s - means.read_s),  # both take as long
    ]
    best = Shares(0.0, 0.0)
    for one, other in combinations(lines, 2):
        shares = _meet(one, other)
        if shares is not None and _fits(means, shares, budget, keeps_raw) and _rank(means, shares) < _rank(means, best):
            best = shares
    return best


def _read(means: Means, shares: Shares) -> float:
    return means.read_s * (1 - shares.fields - shares.raw)


def _meet(one: tuple[float, float, float], other: tuple[float, float, float]) -> Shares | None:
    (a, b, c), (d, e, f) = one, other
    determinant = a * e - b * d
    if abs(determinant) <= _EXACT * max(abs(a), abs(b)) * max(abs(d), abs(e)):
        return None
    fields, raw = (c * e - b * f) / determinant, (a * f - c * d) / determinant
    return Shares(_clean(fields), _clean(raw))


def _clean(share: float) -> float:
    return 0.0 if abs(share) < _EXACT else share


def _fits(means: Means, shares: Shares, budget: float, keeps_raw: bool) -> bool:
    nbytes = means.field_bytes * shares.fields + means.raw_bytes * shares.raw
    least, most = min(shares), shares.fields + shares.raw
    if not keeps_raw and shares.raw > _EXACT:
        return False
    return least >= -_EXACT and most <= 1 + _EXACT and nbytes <= budget * (1 + _EXACT)


def _rank(means: Means, shares: Shares) -> tuple[float, float, float]:
    """Less is better; equal but for rounding is equal."""
    left = _read(means, shares) + means.prepare_s - means.saved_s * shares.fields
    nbytes = means.field_bytes * shares.fields + means.raw_bytes * shares.raw
    whole = means.read_s + means.prepare_s
    return round(seconds(means, shares) / whole, 9), round(left / whole, 9), nbytes
