"""Composition: decides which samples the next batch to deliver consists of.

Two rules. *Fixed*: a batch is what the sampler put together, complete when its last sample is. *Free*: a batch takes
the oldest ready samples of its epoch, whatever their place, but never leaves out a sample whose place is
``max_lateness`` batches back (promise P3). Both compose a batch in the sampler's order as soon as they can, and one out
of order only when ``eager``, since until then an older sample may become ready.

Why free composition can always keep the promise: before batch n is composed, every sample of the places up to n - 1 -
lateness has been delivered. So all samples that must be in batch n belong to place n - lateness, and a batch has room
for one place. (Batch n has the size of place n, and epochs never mix.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from heapq import heappop, heappush

from minato_gpu.samples import OutputBatch, SourceBatch, TicketId
from minato_gpu.scheduling.messages import Compose
from minato_gpu.scheduling.places import Place, Places
from minato_gpu.scheduling.spans import TicketSpan, add, cut


class Composition:
    """Base of the rules by which batches are composed."""

    missing = 1  # least number of samples that the next batch needs beside the ready ones

    def __init__(self, places: Places, lateness: int) -> None:
        self.next = OutputBatch(0)  # order of the batch that is composed next
        self._places = places
        self._lateness = lateness  # batches

    @property
    def held_back(self) -> bool:
        """True when the next batch must contain the oldest incomplete place."""
        oldest = self._places.oldest
        return oldest is not None and oldest.number <= self.next - self._lateness

    def admit(self, place: Place, batch: int) -> None:
        """Adds a place, in the sampler's order. ``batch``: the size of the delivered batch of the same number; 0:
        none."""

    def finished(self, epoch: int, span: TicketSpan, failed: tuple[TicketId, ...], complete: list[Place]) -> None:
        """Records that ``span``, of one epoch, is ready (``failed`` of it as errors), which completes the places
        ``complete``."""

    def compose(self, eager: bool) -> Compose | None:
        """Returns the next batch; None if none can be composed. ``eager``: it may overtake an older, incomplete one."""
        raise NotImplementedError

    def _compose(self, spans: tuple[TicketSpan, ...], failed: tuple[TicketId, ...]) -> Compose:
        order, self.next = self.next, OutputBatch(self.next + 1)
        return Compose(order, spans, failed)


class FixedComposition(Composition):
    """Composes batches as the sampler did, delivered at most ``lateness`` batches late (0: in its order)."""

    def __init__(self, places: Places, lateness: int) -> None:
        super().__init__(places, lateness)
        self._epochs: deque[int] = deque()  # epochs of the places from the next order on
        self._complete: list[tuple[SourceBatch, Place]] = []

    def admit(self, place: Place, batch: int) -> None:
        if batch:
            self._epochs.append(place.epoch)

    def finished(self, epoch: int, span: TicketSpan, failed: tuple[TicketId, ...], complete: list[Place]) -> None:
        for place in complete:
            heappush(self._complete, (place.number, place))

    def compose(self, eager: bool) -> Compose | None:
        """Returns the next batch, or None. In strict order a complete place is composed at once, before its turn."""
        if not self._complete:
            return None
        number, place = self._complete[0]
        spans = ((place.first, place.end),)
        if not self._lateness:
            heappop(self._complete)
            return Compose(OutputBatch(number), spans, tuple(place.failed))  # in strict order place and order are equal
        oldest = self._places.oldest
        overtakes = oldest is not None and oldest.number < number
        if self._epochs[0] != place.epoch or (overtakes and (not eager or self.held_back)):
            return None
        heappop(self._complete)
        self._epochs.popleft()
        return self._compose(spans, tuple(place.failed))

    @property
    def held_back(self) -> bool:
        """True when the next batch must be an incomplete one that is older than all complete ones."""
        return bool(self._complete) and super().held_back


class ItemComposition(Composition):
    """Composes samples that are delivered one by one in the sampler's order, as runs of neighbours, before their turn.

    The order of a run is that of its first sample. A failed sample is a run by itself, and no run crosses a place, so
    that no more samples are taken at once than were admitted together.
    """

    held_back = False

    def __init__(self, places: Places) -> None:
        super().__init__(places, 0)
        self._shift = 0  # from a serial to its order
        self._ends: list[TicketId] = []  # of places, rising
        self._runs: deque[Compose] = deque()

    def admit(self, place: Place, batch: int) -> None:
        self._shift = place.number - place.first
        if place.first < place.end:
            self._ends.append(place.end)

    def finished(self, epoch: int, span: TicketSpan, failed: tuple[TicketId, ...], complete: list[Place]) -> None:
        ends, (lo, hi) = self._ends, span
        cuts = {*ends[bisect_right(ends, lo) : bisect_right(ends, hi)], hi, *failed, *(s + 1 for s in failed)}
        for end in sorted(cuts - {lo}):
            spans, bad = ((lo, TicketId(end)),), (lo,) if lo in failed else ()
            self._runs.append(Compose(OutputBatch(lo + self._shift), spans, bad))
            lo = TicketId(end)
        if (oldest := self._places.oldest) is not None:
            del ends[: bisect_right(ends, oldest.first)]

    def compose(self, eager: bool) -> Compose | None:
        return self._runs.popleft() if self._runs else None


class FreeComposition(Composition):
    """Composes batches of the oldest ready samples, each delivered at most ``lateness`` batches after its place."""

    def __init__(self, places: Places, lateness: int) -> None:
        super().__init__(places, lateness)
        self._next_batches: deque[tuple[int, int]] = deque()  # epoch and size of the next batches
        # by epoch, samples that are ready and in no batch: as sorted spans that never touch, and their number
        self._ready: defaultdict[int, list[TicketSpan]] = defaultdict(list)
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._failed: set[TicketId] = set()

    def admit(self, place: Place, batch: int) -> None:
        if batch:
            self._next_batches.append((place.epoch, batch))

    def finished(self, epoch: int, span: TicketSpan, failed: tuple[TicketId, ...], complete: list[Place]) -> None:
        self._failed.update(failed)
        self._counts[epoch] += span[1] - span[0]
        add(self._ready[epoch], span)

    def compose(self, eager: bool) -> Compose | None:
        if not self._next_batches:
            return None
        epoch, size = self._next_batches[0]
        if self._counts[epoch] < size:
            return None
        oldest = self._places.oldest
        overtakes = oldest is not None and oldest.first < self._ready[epoch][0][0] + size
        if overtakes and (not eager or self.held_back):
            return None
        return self._compose_oldest(epoch, size)

    @property
    def missing(self) -> int:  # type: ignore[override]
        """Samples that the next batch needs beside the ready ones; 0 or less: enough are ready, or none is admitted."""
        return self._next_batches[0][1] - self._counts[self._next_batches[0][0]] if self._next_batches else 0

    def _compose_oldest(self, epoch: int, need: int) -> Compose:
        self._next_batches.popleft()
        ready, left = self._ready[epoch], self._counts[epoch] - need
        spans, self._counts[epoch] = cut(ready, 0, need), left
        ready[:] = cut(ready, need, need + left)
        if not left:
            del self._counts[epoch], self._ready[epoch]  # the epoch may have ended
        failed = tuple(s for s in self._failed if any(lo <= s < hi for lo, hi in spans)) if self._failed else ()
        self._failed.difference_update(failed)
        return self._compose(spans, failed)
