"""Half-open ranges of whole numbers: ``(3, 5)`` holds 3 and 4.

Several spans hold their numbers in the order in which they stand; *offset* k is the k-th number of them all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, starmap
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from minato_gpu.samples import TicketId

Span = tuple[int, int]
TicketSpan = tuple[TicketId, TicketId]

_N = TypeVar("_N", bound=int)

if TYPE_CHECKING:

    def serials(lo: TicketId, hi: TicketId) -> Sequence[TicketId]:
        """Returns the serials of a span."""

else:  # to be counted through for each sample, so without a call of our own
    serials = range


def tickets(spans: Iterable[TicketSpan]) -> Iterator[TicketId]:
    """Yields the serials of spans."""
    return chain.from_iterable(starmap(serials, spans))


def count(spans: Iterable[Span]) -> int:
    """Returns how many numbers spans hold."""
    return sum(map(len, starmap(range, spans)))


def singles(each: Iterable[TicketId]) -> list[TicketSpan]:
    """Returns each serial as a span of its own."""
    return [(serial, TicketId(serial + 1)) for serial in each]


def joined(spans: Iterable[tuple[_N, _N]]) -> list[tuple[_N, _N]]:
    """Returns the spans in their order, with each that directly follows the one before it joined to that."""
    out: list[tuple[_N, _N]] = []
    for lo, hi in spans:
        if out and out[-1][1] == lo:
            out[-1] = out[-1][0], hi
        else:
            out.append((lo, hi))
    return out


def add(spans: list[tuple[_N, _N]], span: tuple[_N, _N]) -> None:
    """Inserts a span into spans that rise and do not touch each other, and that hold none of its numbers."""
    lo, hi = span
    at = bisect_left(spans, span)
    end = at
    if at < len(spans) and spans[at][0] == hi:
        hi, end = spans[at][1], at + 1
    if at and spans[at - 1][1] == lo:
        lo, at = spans[at - 1][0], at - 1
    spans[at:end] = [(lo, hi)]


def cut(spans: Sequence[tuple[_N, _N]], start: int, stop: int) -> tuple[tuple[_N, _N], ...]:
    """Returns the spans of offsets ``start`` to ``stop``."""
    out: list[tuple[_N, _N]] = []
    for lo, hi in spans:
        size = hi - lo
        a, b = max(start, 0), min(stop, size)
        if a < b:
            out.append((lo + a, lo + b))  # type: ignore[arg-type]
        start, stop = start - size, stop - size
    return tuple(out)


def number_at(spans: Sequence[tuple[_N, _N]], offset: int) -> _N:
    """Returns the number at an offset. Raises IndexError where there is none."""
    return cut(spans, offset, offset + 1)[0][0]


def shifted(spans: Iterable[Span], by: int) -> list[Span]:
    """Returns the spans of numbers that are greater by ``by``."""
    return [(lo + by, hi + by) for lo, hi in spans]


def without(spans: Iterable[tuple[_N, _N]], holes: Sequence[tuple[_N, _N]]) -> Iterator[tuple[_N, _N]]:
    """Yields the spans less the holes: ``without([(0, 9)], [(2, 3), (5, 7)])`` yields (0, 2), (3, 5) and (7, 9).

    The spans come in any order, the holes in rising order; every hole lies within one of the spans.
    """
    for lo, hi in spans:
        at = bisect_left(holes, (lo, lo))
        while at < len(holes) and holes[at][0] < hi:
            begin, end = holes[at]
            if lo < begin:
                yield lo, begin
            lo, at = end, at + 1
        if lo < hi:
            yield lo, hi


class HasSpan(Protocol):
    """Something that holds the tickets of one span."""

    first: TicketId
    end: TicketId


_P = TypeVar("_P", bound=HasSpan)


class BySerial(Generic[_P]):
    """Finds places by the serials of the tickets that they hold."""

    def __init__(self) -> None:
        self.places: list[_P] = []
        self._firsts: list[TicketId] = []

    def admit(self, place: _P) -> None:
        """Adds a place, in rising order of serials."""
        self.places.append(place)
        self._firsts.append(place.first)

    def at(self, serial: TicketId) -> _P:
        """Returns the place that holds the serial; any other, or IndexError, if none does."""
        return self.places[bisect_right(self._firsts, serial) - 1]

    def parts(self, spans: Iterable[TicketSpan]) -> Iterator[tuple[_P, TicketId, TicketId]]:
        """Yields the spans, cut where places meet, each part with its place (which may be removed meanwhile)."""
        for lo, hi in spans:
            while lo < hi:
                place = self.places[bisect_right(self._firsts, lo) - 1]
                upto = min(hi, place.end)
                yield place, lo, upto
                lo = upto

    def remove(self, place: _P) -> None:
        """Removes a place."""
        at = bisect_right(self._firsts, place.first) - 1
        del self.places[at], self._firsts[at]

    def clear(self) -> None:
        """Removes all places."""
        self.places, self._firsts = [], []
