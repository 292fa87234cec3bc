"""What brings samples' bytes to the scheduler under a virtual clock, as the simulated loader sees it.

The simulation knows no storage of its own: whoever simulates brings one (``analysis/virtual_storage.py`` puts the
reader process' own decisions there), and this room goes on importing nothing but decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


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
