"""What the loader has not said to its reader process: many tickets are said together, where nobody waits for it.

Most are wanted long before anybody needs them, and what is released makes room for such. Said one batch at a time they
would wake the reader three times for each. Decisions only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minato_gpu.sources.reading import Place
from minato_gpu.sources.service import Wanted

TOGETHER = 64  # tickets
_FAR = 512  # tickets: what is wanted so long before it enters the window may wait
_NBYTES = 4 << 20  # released: room that the reader is not to miss

Want = tuple[int, Sequence[Wanted]]
"""A place, or some of it (see ``Service.want``)."""


class Unsaid:
    """What is wanted, and what is released, of one run."""

    def __init__(self) -> None:
        self._wanted: list[Want] = []
        self._tickets = 0
        self._released: list[int] = []
        self._nbytes = 0

    def want(self, place: int, tickets: Sequence[Wanted]) -> None:
        """These are wanted, after all before."""
        if tickets:
            self._wanted.append((place, tickets))
            self._tickets += len(tickets)

    def release(self, ticket: int, places: Iterable[Place]) -> None:
        """What was there for a ticket is not needed any more."""
        self._released.append(ticket)
        for place in places:
            self._nbytes += place[1]

    def is_due(self, admitted: int, missing: int) -> bool:
        """Whether to say it now: tickets before ``admitted`` are in the window, and ``missing`` of these not there."""
        if not self._tickets and not self._released:
            return False
        if missing or self._tickets >= TOGETHER or len(self._released) >= TOGETHER or self._nbytes >= _NBYTES:
            return True
        return bool(self._tickets) and self._wanted[0][1][0][0] < admitted + _FAR

    def take(self) -> tuple[list[int], list[Want]]:
        """All of it: released, and wanted."""
        said = self._released, self._wanted
        self._wanted, self._tickets, self._released, self._nbytes = [], 0, [], 0
        return said
