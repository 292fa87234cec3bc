"""Tickets whose bytes are still on their way from storage: no lane is given them before.

Example: of a place with serials 0 to 3 the bytes of 0, 1 and 3 have come. These wait for a lane; 2 is held here until
``Fetched`` names it. Where a place should be prepared by one worker as a whole, all of it is held until the last has
come.
"""

from __future__ import annotations

from collections.abc import Iterable

from minato_gpu.samples import TicketId
from minato_gpu.scheduling.places import Place, Places
from minato_gpu.spans import TicketSpan

Part = tuple[Place, TicketId, TicketId]
"""Serials of an admitted place that can be prepared now."""


class Fetching:
    """The places that wait for bytes. ``whole``: a place waits for all of its own.

    ``idle_s``: how long slots of lanes had nothing to do because of that, added up.
    """

    def __init__(self, places: Places, *, whole: bool) -> None:
        self.idle_s = 0.0
        self._places = places
        self._whole = whole
        self._held = 0  # places of which some is unfetched
        self.watches = False  # whether ``observe`` wants to be told
        self._idle = 0  # slots that have been idle since
        self._since = 0.0

    def __len__(self) -> int:
        return self._held

    def admit(self, place: Place, fetched: Iterable[TicketSpan]) -> list[Part]:
        """A place of which some is fetched enters the window; returns what of it can be prepared."""
        place.unfetched = place.missing
        self._held += 1
        self.watches = True
        return self.arrived(fetched)

    def arrived(self, spans: Iterable[TicketSpan]) -> list[Part]:
        """The bytes of these serials are there; returns what can be prepared for that reason."""
        out: list[Part] = []
        for lo, hi in spans:
            place = self._places.at(lo)
            place.unfetched -= hi - lo
            if not self._whole:
                out.append((place, lo, hi))
            elif not place.unfetched:
                out.append((place, place.first, place.end))
            self._held -= not place.unfetched
        return out

    @property
    def of_oldest(self) -> int:
        """How many samples of the oldest place are not with a lane for want of bytes."""
        place = self._places.oldest
        if place is None or not place.unfetched:
            return 0
        return place.end - place.first if self._whole else place.unfetched

    def observe(self, now: float, idle: int) -> None:
        """From now on so many slots have nothing to do although places wait here."""
        self.idle_s += self._idle * (now - self._since)
        self._idle, self._since = idle if self._held else 0, now
        self.watches = bool(self._held)
