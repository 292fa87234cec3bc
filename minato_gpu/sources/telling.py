"""When the reader process tells what has come: a wake-up of the loader costs more than a hundred samples told by it.

So samples are told together: quickly where somebody may be waiting, which is where the loader has few left that it
knows of, or where one comes late, after those that will be needed after it. Decisions only, told what is there.
"""

from __future__ import annotations

from minato_gpu.sources.service import Told

PLENTY = 128  # samples: the loader knows so many that nobody waits for more
SOON_S, LATER_S = 3e-3, 100e-3
_SHARE = 4  # what is not told is a part of what is known, so that a fast loader does not come to the end of that


class Telling:
    """What has come and is not told."""

    def __init__(self) -> None:
        self._told: list[Told] = []
        self._furthest = -1
        self._soon = False

    def add(self, told: Told, there: int) -> float | None:
        """A ticket is there, one of ``there``; returns in how many seconds to tell, None where that is known."""
        ticket = told[0]
        self._told.append(told)
        late = ticket < self._furthest - PLENTY
        self._furthest = max(self._furthest, ticket)
        return self.look(there, late=late) or (LATER_S if len(self._told) == 1 else None)

    def look(self, there: int, *, late: bool = False) -> float | None:
        """So many are there by now, as some were released: the same."""
        count = len(self._told)
        known = there - count
        if not count or self._soon or not (late or known < PLENTY or _SHARE * count > known):
            return None
        self._soon = True
        return SOON_S

    def take(self) -> list[Told]:
        """All of it, to be told now."""
        told, self._told, self._soon = self._told, [], False
        return told
