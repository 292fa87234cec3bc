"""Half-open ranges of whole numbers: ``(3, 5)`` holds 3 and 4."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

_N = TypeVar("_N", bound=int)


def without(spans: Iterable[tuple[_N, _N]], holes: Sequence[tuple[_N, _N]]) -> Iterator[tuple[_N, _N]]:
    """The spans less the holes: ``without([(0, 9)], [(2, 3), (5, 7)])`` yields (0, 2), (3, 5) and (7, 9).

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
