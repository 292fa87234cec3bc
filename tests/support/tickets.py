"""Tickets' numbers for tests, from plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from minato_gpu.samples import Position, SourceBatch, TicketId
from minato_gpu.scheduling.messages import DEVICE, Admitted
from minato_gpu.scheduling.places import Place
from minato_gpu.scheduling.spans import TicketSpan
from minato_gpu.scheduling.waiting import Entry


def span(lo: int, hi: int) -> TicketSpan:
    """A half-open range of serials."""
    return TicketId(lo), TicketId(hi)


def spans(*given: tuple[int, int]) -> tuple[TicketSpan, ...]:
    """Several of them."""
    return tuple(span(lo, hi) for lo, hi in given)


def positions(lo: int, hi: int) -> Sequence[Position]:
    """Neighbours in the sampler's order."""
    return cast("Sequence[Position]", range(lo, hi))


def entry_of(
    lo: int, hi: int, base: int, cpu: float | None = None, device: float | None = None, home: str = DEVICE
) -> Entry:
    """An ``Entry`` of these serials, in the place that begins with serial ``base``."""
    place = Place(Admitted(0.0, SourceBatch(0), 0, TicketId(base), hi - base, home=home))
    return Entry(TicketId(lo), TicketId(hi), place, cpu, device)
