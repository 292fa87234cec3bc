"""What became of samples before anybody worked on them, for a trace."""

from __future__ import annotations

from bisect import bisect_right


class Before:
    """When an epoch's samples were drawn, place by place, and since when bytes are there of those not worked on."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._drawn: list[float] = []
        self.came: dict[int, float] = {}  # by position

    def drew(self, start: int, at: float) -> None:
        """A place that begins at this position; places come in their order."""
        self._starts.append(start)
        self._drawn.append(at)

    def drawn(self, position: int) -> float | None:
        """When it was; None where nobody heard that."""
        place = bisect_right(self._starts, position) - 1
        return self._drawn[place] if place >= 0 else None

    def there(self, first: int, stop: int) -> float | None:
        """Since when the bytes of all of these are there. Forgets it."""
        if not self.came:
            return None
        known = [at for each in range(first, stop) if (at := self.came.pop(each, None)) is not None]
        return max(known, default=None)
