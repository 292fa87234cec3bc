"""The sampler's side of a simulated run: which batches have been drawn, are read, and have entered the window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from minato_gpu.lab.simulation.work import Work
from minato_gpu.samples import SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.spans import TicketSpan


class Arrival(NamedTuple):
    """An announcement to the loader: the bytes of these samples are there, and when."""

    at: float
    serials: Sequence[int]


class Reading(Protocol):
    """A simulated storage that brings samples' bytes to the scheduler (analysis/virtual_storage.py).

    Every call carries the time. ``ahead``: batches beyond the window that are drawn, and wanted, early."""

    ahead: int

    def begin(self, now: float, epoch: int) -> None:
        """Begins an epoch: later wants are of it."""

    def want(self, now: float, place: int, serials: range) -> None:
        """Asks for the bytes of the samples of a batch that has been drawn."""

    def next_at(self) -> float:
        """Returns when something happens next; infinite where nothing will."""

    def advance(self, until: float) -> Arrival | None:
        """Lets time pass until something is announced to the loader, or until then: None."""


class VirtualIntake:
    """Batches in the sampler's order. ``overlap``, ``precise``, ``reading``: see VirtualLoader.

    ``delivered``, below: batches that the consumer has had; ``over``: its step with the last of them has ended.
    """

    def __init__(
        self, work: Work, policy: Policy, reading: Reading | None = None, *, overlap: bool, precise: bool
    ) -> None:
        self._work, self._policy, self._reading = work, policy, reading
        self._overlap, self._precise = overlap, precise
        self._cpu: list[float] = work.predicted_cpu.tolist()
        self._device = None if work.predicted_device is None else work.predicted_device.tolist()
        self._drawn = self._admitted = 0
        self._here: set[int] = set()  # bytes that are there, of samples that are not in the window yet

    def draw(self, now: float, delivered: int, *, over: bool) -> None:
        """Has the bytes read of what the window holds, and as far beyond it as is drawn early."""
        work, reading = self._work, self._reading
        if reading is None:
            return
        window = self._policy.window // work.batch
        while self._drawn < min(work.batches, delivered + window + reading.ahead):
            at = self._drawn
            if not self._may_draw(at, delivered, over=over):
                return
            if work.begins[at] == at:
                reading.begin(now, int(work.epochs[at]))
            self._drawn += 1
            reading.want(now, at, range(int(work.firsts[at]), int(work.firsts[at + 1])))

    def next(self, now: float, delivered: int, room: int, *, over: bool) -> m.Admitted | None:
        """Returns the next batch, if it may enter a window with room for so many samples."""
        at, work = self._admitted, self._work
        if at == work.batches or room < work.sizes[at] or not self._may_draw(at, delivered, over=over):
            return None
        if self._reading is not None and at >= self._drawn:
            return None
        self._admitted += 1
        first, stop, epoch = int(work.firsts[at]), int(work.firsts[at + 1]), int(work.epochs[at])
        cpu: list[float] | None = self._cpu[first:stop]
        device = None if self._device is None else self._device[first:stop]
        between = [work.plans(serial) for serial in range(first, stop)] if work.cuts else None
        if work.header_s is not None:
            cpu = device = None
        what = SourceBatch(at), epoch, TicketId(first), stop - first
        homes = self._policy.homes
        home = homes[self.home(at) % len(homes)]
        after = int(work.firsts[np.searchsorted(work.epochs, epoch, side="right")]) - stop
        fetched = None
        if self._reading is not None:
            here = self._here.intersection(range(first, stop))
            self._here -= here
            fetched = _spans(here)
        return m.Admitted(
            now, *what, cpu, device, after == 0, between=between, home=home, fetched=fetched, follow=after
        )

    def came(self, serials: Sequence[int]) -> list[TicketSpan]:
        """Takes in bytes that have come.

        Returns what is to be announced to the scheduler: samples in the window. The others are announced as they
        enter.
        """
        admitted = int(self._work.firsts[self._admitted])
        self._here.update(serial for serial in serials if serial >= admitted)
        return _spans(serial for serial in serials if serial < admitted)

    def home(self, batch: int) -> int:
        """The number of the device that a batch goes to."""
        return (batch - self._work.begins[batch]) % self._policy.devices

    def _may_draw(self, batch: int, delivered: int, *, over: bool) -> bool:
        """Returns whether a batch that begins an epoch may be drawn: the one before has ended, or, if epochs
        overlap, has begun."""
        begins = self._work.begins
        if batch == 0 or begins[batch] != batch or (self._overlap and not self._precise):
            return True
        after = begins[batch - 1] if self._overlap else batch
        return delivered > after or (delivered == after and over)


def _spans(serials: Iterable[int]) -> list[TicketSpan]:
    """One for each: a span may not reach over batches."""
    return [(TicketId(serial), TicketId(serial + 1)) for serial in sorted(serials)]
