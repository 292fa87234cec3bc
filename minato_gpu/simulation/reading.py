"""What brings samples' bytes to the scheduler under a virtual clock, as the simulated loader sees it.

The simulation knows no storage of its own: whoever simulates brings one (``analysis/virtual_storage.py`` puts the
reader process' own decisions there), and this room goes on importing nothing but decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from minato_gpu.samples import TicketId
from minato_gpu.scheduling.messages import TicketSpan


class Arrival(NamedTuple):
    """The loader is told that the bytes of these samples are there, and when."""

    at: float
    serials: Sequence[int]


class Reading(Protocol):
    """Told the time with every call. ``ahead``: batches beyond the window that are drawn, and wanted, early."""

    ahead: int

    def begin(self, now: float, epoch: int) -> None:
        """What is wanted from now on is of this epoch."""

    def want(self, now: float, place: int, serials: range) -> None:
        """The samples of a batch that has been drawn."""

    def release(self, now: float, serials: Iterable[int]) -> None:
        """These have been prepared."""

    def next_at(self) -> float:
        """When something happens next; infinite where nothing will."""

    def advance(self, until: float) -> Arrival | None:
        """Let time pass until the loader is told of something, or until then: None."""


class Arrived:
    """Which samples' bytes are there: of those in the window the scheduler is told, of the others as they enter."""

    def __init__(self) -> None:
        self._here: set[int] = set()
        self._admitted = 0

    def came(self, serials: Iterable[int]) -> list[TicketSpan]:
        """Bytes have come; returns what the scheduler is to be told of, one sample each."""
        now: list[int] = []
        later: list[int] = []
        for serial in serials:
            (now if serial < self._admitted else later).append(serial)
        self._here.update(later)
        return _spans(now)

    def admit(self, first: int, stop: int) -> list[TicketSpan]:
        """A batch enters the window; returns what of it is there."""
        self._admitted = stop
        here = self._here.intersection(range(first, stop))
        self._here -= here
        return _spans(here)


def _spans(serials: Iterable[int]) -> list[TicketSpan]:
    """One for each: a span may not reach over batches."""
    return [(TicketId(serial), TicketId(serial + 1)) for serial in sorted(serials)]
