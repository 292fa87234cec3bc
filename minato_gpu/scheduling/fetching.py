"""Tickets whose bytes are still on their way from storage: no lane is given them before.

Example: of a place with serials 0 to 3 the bytes of 0, 1 and 3 have come. These wait for a lane; 2 is held here until
``Fetched`` names it. Where a place should be prepared by one worker as a whole, all of it is held until the last has
come.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from minato_gpu.samples import TicketId
from minato_gpu.scheduling.messages import Admitted, TicketSpan

Part = tuple[Admitted, TicketId, TicketId]
"""Serials of an admitted place that can be prepared now."""


class _Held:
    """A place of which ``left`` serials are not fetched."""

    __slots__ = ("admitted", "left")

    def __init__(self, admitted: Admitted) -> None:
        self.admitted = admitted
        self.left = admitted.size


class Fetching:
    """The admitted places that wait for bytes. ``whole``: a place waits for all of its own.

    ``idle_s``: how long slots of lanes had nothing to do because of that, added up.
    """

    def __init__(self, *, whole: bool) -> None:
        self.idle_s = 0.0
        self._whole = whole
        self._held: dict[TicketId, _Held] = {}  # by first serial, rising
        self._firsts: list[TicketId] = []
        self.watches = False  # whether ``observe`` wants to be told
        self._idle = 0  # slots that have been idle since
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, event: Admitted) -> list[Part]:
        """A place of which some is fetched enters the window; returns what of it can be prepared."""
        assert event.fetched is not None
        self._held[event.first] = _Held(event)
        self.watches = True
        self._firsts.append(event.first)
        return self.arrived(event.fetched)

    def arrived(self, spans: Iterable[TicketSpan]) -> list[Part]:
        """The bytes of these serials are there; returns what can be prepared for that reason."""
        out: list[Part] = []
        for lo, hi in spans:
            held = self._held[self._firsts[bisect_right(self._firsts, lo) - 1]]
            held.left -= hi - lo
            if not self._whole:
                out.append((held.admitted, lo, hi))
            if held.left == 0:
                first, size = held.admitted.first, held.admitted.size
                if self._whole:
                    out.append((held.admitted, first, TicketId(first + size)))
                del self._held[first]
                self._firsts.remove(first)
        return out

    def samples_of(self, base: TicketId) -> int:
        """How many samples of the place that begins with serial ``base`` are not with a lane for want of bytes."""
        held = self._held.get(base)
        if held is None:
            return 0
        return held.admitted.size if self._whole else held.left

    def observe(self, now: float, idle: int) -> None:
        """From now on so many slots have nothing to do although places wait here."""
        self.idle_s += self._idle * (now - self._since)
        self._idle, self._since = idle if self._held else 0, now
        self.watches = bool(self._held)
