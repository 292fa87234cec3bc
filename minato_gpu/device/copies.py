"""Plans the copies that fill a batch on the device: as few as possible, by copying neighbours together. Pure functions.

A batch on the device has the layout of its slab on the host, so a batch with its own slab is one copy. Rows that are on
the device already leave gaps. A gap between two ranges at the same offset from source to target may be copied along:
what is written into it is overwritten later in the same stream by the device's rows, and costs only the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

MOST = 8
"""Small copies issued for one batch: each holds the interpreter lock for some microseconds."""

WORTH = 16 << 10
"""Bytes that are worth a copy of their own. A host thread gathers them in 8 us (2 GB/s on an H200's host, rows of
600 KB); a copy takes about 3 us."""


class CopyRange(NamedTuple):
    """A range of bytes to be copied from the host arena into the batch."""

    source: int  # offset in the arena, bytes
    target: int  # offset in the batch, bytes
    nbytes: int


def plan(runs: Iterable[CopyRange], ends: Sequence[int] = (), most: int = MOST) -> list[CopyRange] | None:
    """Returns at most ``most`` copies that cover the ranges; None when that many do not suffice and the host must
    gather.

    ``ends``: offsets in the arena that no copy may cross (ends of pinned pieces). ``runs`` do not overlap in the batch.
    """
    exact = _joined(sorted((run for run in runs if run.nbytes), key=lambda run: run.target), 0)
    gaps = sorted(b.target - (a.target + a.nbytes) for a, b in pairwise(exact) if _same_offset(a, b))
    for gap in [0, *gaps][max(0, len(exact) - most) :]:  # bridging the n smallest gaps saves n copies
        found = _split(_joined(exact, gap), ends)
        if len(found) <= most:
            return found
    return None


def _same_offset(a: CopyRange, b: CopyRange) -> bool:
    return b.source - a.source == b.target - a.target


def _joined(runs: Sequence[CopyRange], gap: int) -> list[CopyRange]:
    """Joins neighbours with the same offset and at most ``gap`` bytes between them."""
    out: list[CopyRange] = []
    for run in runs:
        last = out[-1] if out else None
        if last is not None and _same_offset(last, run) and run.target - (last.target + last.nbytes) <= gap:
            out[-1] = CopyRange(last.source, last.target, run.target + run.nbytes - last.target)
        else:
            out.append(run)
    return out


def _split(runs: Sequence[CopyRange], ends: Sequence[int]) -> list[CopyRange]:
    out: list[CopyRange] = []
    for run in runs:
        begin, stop = run.source, run.source + run.nbytes
        for end in (*(e for e in ends if begin < e < stop), stop):
            out.append(CopyRange(begin, run.target + begin - run.source, end - begin))
            begin = end
    return out
