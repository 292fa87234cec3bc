"""``Fetching``: holds tickets back until their bytes have been read from storage.

Example: of a place with serials 0 to 3 the bytes of 0, 1 and 3 have arrived. These wait for a lane; 2 is held here
until ``Fetched`` names it. Where one worker should prepare a place as a whole, all of it is held until the last has
arrived.
"""

from __future__ import annotations

from collections.abc import Iterable

from minato_gpu.samples import TicketId
from minato_gpu.scheduling.places import Place, Places
from minato_gpu.scheduling.spans import TicketSpan

Part = tuple[Place, TicketId, TicketId]
"""Serials of an admitted place that can be prepared now."""


class Fetching:
    """Places that wait for bytes. ``whole``: a place is held until all of its bytes have arrived."""

    def __init__(self, places: Places, *, whole: bool) -> None:
        self.idle_s = 0.0  # seconds that slots were idle for want of bytes, added up
        self._places = places
        self._whole = whole
        self._held = 0  # places with unfetched samples
        self.watches = False  # samples are held, or were when ``observe`` was called last
        self._idle = 0  # idle slots since ``_since``
        self._since = 0.0

    def __len__(self) -> int:
        return self._held

    def admit(self, place: Place, fetched: Iterable[TicketSpan]) -> list[Part]:
        """Adds a place of which the spans ``fetched`` have arrived; returns what of it can be prepared."""
        place.unfetched = place.missing
        self._held += 1
        self.watches = True
        return self.arrived(fetched)

    def arrived(self, spans: Iterable[TicketSpan]) -> list[Part]:
        """Records that the bytes of these serials have arrived; returns what can be prepared now."""
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
        """Samples of the window's oldest incomplete place that are held back here; 0 if that place waits for no
        bytes."""
        place = self._places.oldest
        if place is None or not place.unfetched:
            return 0
        return place.end - place.first if self._whole else place.unfetched

    def observe(self, now: float, idle: int) -> None:
        """Records that from ``now`` on ``idle`` slots have nothing to do while places wait here."""
        self.idle_s += self._idle * (now - self._since)
        self._idle, self._since = idle if self._held else 0, now
        self.watches = bool(self._held)
