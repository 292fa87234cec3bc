"""Which copies fill a batch on the device: as few as there are, by letting neighbours share one. Pure decisions.

A batch's memory on the device is laid out as its slab on the host is, so that a batch with its own slab is one copy.
Rows that the device has made leave gaps. A gap between two runs that lie equally far apart on both sides may be copied
along: whatever is written into a gap is overwritten afterwards, in the same stream, by the rows that the device has
made, and costs but the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

MOST = 8
"""Small copies issued for one batch: each takes the interpreter some microseconds from the training loop."""

WORTH = 16 << 10
"""Bytes that are worth a copy of their own, however many copies there are. One thread gathers 2 GB/s on the host (an
H200's, rows of 600 KB): these take it 8 us, a copy about 3."""


def worth(nbytes: int) -> int:
    """How many copies at most a batch of so many bytes is worth."""
    return max(MOST, nbytes // WORTH)


class CopyRange(NamedTuple):
    """``nbytes`` bytes from offset ``source`` of an arena on the host to offset ``target`` of the batch."""

    source: int
    target: int
    nbytes: int


def plan(runs: Iterable[CopyRange], ends: Sequence[int] = (), most: int = MOST) -> list[CopyRange] | None:
    """At most ``most`` copies that cover the runs; None when they cannot be joined that far, and must be gathered.

    ``ends``: offsets in the arena that no copy may cross, because memory is pinned piece by piece. ``runs`` do not
    overlap in the batch.
    """
    exact = _joined(sorted((run for run in runs if run.nbytes), key=lambda run: run.target), 0)
    gaps = sorted(b.target - (a.target + a.nbytes) for a, b in pairwise(exact) if _in_step(a, b))
    for gap in [0, *gaps][max(0, len(exact) - most) :]:  # to bridge the n smallest saves n copies
        found = _split(_joined(exact, gap), ends)
        if len(found) <= most:
            return found
    return None


def _in_step(a: CopyRange, b: CopyRange) -> bool:
    return b.source - a.source == b.target - a.target


def _joined(runs: Sequence[CopyRange], gap: int) -> list[CopyRange]:
    """Neighbours in step with at most ``gap`` bytes between them become one."""
    out: list[CopyRange] = []
    for run in runs:
        last = out[-1] if out else None
        if last is not None and _in_step(last, run) and run.target - (last.target + last.nbytes) <= gap:
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
