"""What the next batch to deliver consists of.

Two rules. *Fixed*: a batch is what the sampler put together; it is complete when its last sample is. *Free*: a batch
takes the oldest ready samples of its epoch, whatever their place, but never leaves out one whose place is
``max_lateness`` batches back (promise P3). Both compose a batch of the sampler's own order as soon as they can; one
out of order only when ``eager``, because until then an older sample may still become ready.

Why free composition can always keep that promise: before batch n is composed, every sample of the places up
to n - 1 - lateness has been delivered, so all that must be in batch n belong to place n - lateness, and a batch
has room for one place. (Batch n has the size of place n, and epochs never mix.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from heapq import heappop, heappush

from minato_gpu.samples import OutputBatch, SourceBatch, TicketId
from minato_gpu.scheduling.messages import Compose
from minato_gpu.scheduling.places import Place, Places
from minato_gpu.spans import TicketSpan, add, cut


class Composition:
    """``next``: the order of the batch that is composed next; ``lateness`` in batches. ``missing``: samples that the
    next batch needs beside those that are ready, at least."""

    missing = 1

    def __init__(self, places: Places, lateness: int) -> None:
        self.next = OutputBatch(0)
        self._places = places
        self._lateness = lateness

    @property
    def held_back(self) -> bool:
        """Whether the next batch needs the oldest place, of which a sample is not ready."""
        oldest = self._places.oldest
        return oldest is not None and oldest.number <= self.next - self._lateness

    def admit(self, place: Place, batch: int) -> None:
        """A place was admitted; they come in the sampler's order. ``batch``: samples of the batch of its number."""

    def finished(self, epoch: int, span: TicketSpan, failed: tuple[TicketId, ...], complete: list[Place]) -> None:
        """``span``, of one epoch, is ready, ``failed`` of it as errors, and with it the places ``complete``."""

    def compose(self, eager: bool) -> Compose | None:
        """The next batch, or None."""
        raise NotImplementedError

    def _compose(self, spans: tuple[TicketSpan, ...], failed: tuple[TicketId, ...]) -> Compose:
        order, self.next = self.next, OutputBatch(self.next + 1)
        return Compose(order, spans, failed)


class FixedComposition(Composition):
    """Batches as the sampler composed them, delivered at most ``lateness`` batches late (0: in its order)."""

    def __init__(self, places: Places, lateness: int) -> None:
        super().__init__(places, lateness)
        self._epochs: deque[int] = deque()  # of the places from the next order on
        self._complete: list[tuple[SourceBatch, Place]] = []

    def admit(self, place: Place, batch: int) -> None:
        if batch:
            self._epochs.append(place.epoch)

    def finished(self, epoch: int, span: TicketSpan, failed: tuple[TicketId, ...], complete: list[Place]) -> None:
        for place in complete:
            heappush(self._complete, (place.number, place))

    def compose(self, eager: bool) -> Compose | None:
        """The next batch, or None. In strict order a complete place is composed at once, whatever its turn."""
        if not self._complete:
            return None
        number, place = self._complete[0]
        spans = ((place.first, place.end),)
        if not self._lateness:
            heappop(self._complete)
            return Compose(OutputBatch(number), spans, tuple(place.failed))  # in strict order they are the same number
        oldest = self._places.oldest
        overtakes = oldest is not None and oldest.number < number
        if self._epochs[0] != place.epoch or (overtakes and (not eager or self.held_back)):
            return None
        heappop(self._complete)
        self._epochs.popleft()
        return self._compose(spans, tuple(place.failed))

    @property
    def held_back(self) -> bool:
        """Whether the next batch must be an older one than those that are complete."""
        return bool(self._complete) and super().held_back


class ItemComposition(Composition):
    """Samples that are delivered one by one in the sampler's order: a run of them as soon as it is ready, whatever its
    turn. The order of a run is that of its first sample. One that has failed is a run by itself, and so is what is of
    another place: no more samples are taken at once than have been admitted together."""

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
    """Batches of whatever is ready, oldest first, at most ``lateness`` batches after its place."""

    def __init__(self, places: Places, lateness: int) -> None:
        super().__init__(places, lateness)
        self._due: deque[tuple[int, int]] = deque()  # epoch and size of the next batches
        # by epoch, what is ready and in no batch: sorted spans that never touch, and how many samples these hold
        self._ready: defaultdict[int, list[TicketSpan]] = defaultdict(list)
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._failed: set[TicketId] = set()

    def admit(self, place: Place, batch: int) -> None:
        if batch:
            self._due.append((place.epoch, batch))

    def finished(self, epoch: int, span: TicketSpan, failed: tuple[TicketId, ...], complete: list[Place]) -> None:
        self._failed.update(failed)
        self._counts[epoch] += span[1] - span[0]
        add(self._ready[epoch], span)

    def compose(self, eager: bool) -> Compose | None:
        if not self._due:
            return None
        epoch, size = self._due[0]
        if self._counts[epoch] < size:
            return None
        oldest = self._places.oldest
        overtakes = oldest is not None and oldest.first < self._ready[epoch][0][0] + size
        if overtakes and (not eager or self.held_back):
            return None
        return self._take(epoch, size)

    @property
    def missing(self) -> int:  # type: ignore[override]
        """How many samples the next batch needs beside those that are ready."""
        return self._due[0][1] - self._counts[self._due[0][0]] if self._due else 0

    def _take(self, epoch: int, need: int) -> Compose:
        self._due.popleft()
        ready, left = self._ready[epoch], self._counts[epoch] - need
        spans, self._counts[epoch] = cut(ready, 0, need), left
        ready[:] = cut(ready, need, need + left)
        if not left:
            del self._counts[epoch], self._ready[epoch]  # perhaps it was the epoch's last
        failed = tuple(s for s in self._failed if any(lo <= s < hi for lo, hi in spans)) if self._failed else ()
        self._failed.difference_update(failed)
        return self._compose(spans, failed)
