"""Tickets' numbers for tests, from plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from minato_gpu.samples import Position, TicketId
from minato_gpu.scheduling.messages import TicketSpan
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


def entry_of(lo: int, hi: int, base: int, *more: Any, **named: Any) -> Entry:
    """An ``Entry`` of these serials."""
    return Entry(TicketId(lo), TicketId(hi), TicketId(base), *more, **named)
