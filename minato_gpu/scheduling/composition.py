"""What the next batch to deliver consists of.

Two rules. *Fixed*: a batch is what the sampler put together; it is complete when its last sample is. *Free*: a batch
takes the oldest ready samples of its epoch, whatever their place, but never leaves out one whose place is
``max_lateness`` batches back (promise P3). Both compose a batch of the sampler's own order as soon as they can; one
out of order only when ``eager``, because until then an older sample may still become ready.

Why free composition can always keep that promise: before batch n is composed, every sample of the places up
to n - 1 - lateness has been delivered, so all that must be in batch n belong to place n - lateness, and a batch
has room for one place. (Batch n has the size of place n, and epochs never mix.)

With ``spreads``, free composition gives every batch a sample that did not fail, if one is ready or under way: it
changes places with the youngest failed one of the batch. Samples that did not fail come no later for it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from heapq import heappop, heappush

from minato_gpu.samples import OutputBatch, SourceBatch, TicketId
from minato_gpu.scheduling.messages import Compose, TicketSpan, tickets
from minato_gpu.scheduling.places import Place, Places


class FixedComposition:
    """Batches as the sampler composed them, delivered at most ``lateness`` batches late (0: in its order)."""

    def __init__(self, places: Places, lateness: int) -> None:
        self._places = places
        self._lateness = lateness
        self._epochs: deque[int] = deque()  # of the places from the next order on
        self._complete: list[tuple[SourceBatch, Place]] = []
        self._next = OutputBatch(0)

    def resume(self, order: OutputBatch) -> None:
        """The batches before ``order`` were delivered by an earlier run."""
        self._next = order

    def admit(self, place: Place, batch: int) -> None:
        """A place was admitted; they come in the sampler's order. ``batch``: samples of the batch of its number."""
        if batch:
            self._epochs.append(place.epoch)

    def finished(self, span: TicketSpan, failed: tuple[TicketId, ...], complete: list[Place]) -> None:
        """``span`` is ready, and with it the places ``complete``."""
        for place in complete:
            heappush(self._complete, (place.number, place))

    def compose(self, eager: bool) -> Compose | None:
        """The next batch, or None. In strict order a complete place is composed at once, whatever its turn."""
        if not self._complete:
            return None
        number, place = self._complete[0]
        if not self._lateness:
            heappop(self._complete)
            return self._batch(OutputBatch(number), place)  # in strict order they are the same number
        oldest = self._places.oldest
        overtakes = oldest is not None and oldest.number < number
        if self._epochs[0] != place.epoch or (overtakes and (not eager or self.held_back)):
            return None
        heappop(self._complete)
        self._epochs.popleft()
        order, self._next = self._next, OutputBatch(self._next + 1)
        return self._batch(order, place)

    missing = 1  # samples until a batch might be complete, at least

    @property
    def held_back(self) -> bool:
        """Whether the next batch must be an older one than those that are complete."""
        oldest = self._places.oldest
        return oldest is not None and bool(self._complete) and oldest.number <= self._next - self._lateness

    @staticmethod
    def _batch(order: OutputBatch, place: Place) -> Compose:
        return Compose(order, ((place.first, place.end),), tuple(place.failed))


class FreeComposition:
    """Batches of whatever is ready, oldest first, at most ``lateness`` batches after its place."""

    def __init__(self, places: Places, lateness: int, spreads: bool = False) -> None:
        self._places = places
        self._lateness = lateness
        self._spreads = spreads
        self._due: deque[tuple[int, int]] = deque()  # epoch and size of the next batches
        self._starts: list[tuple[TicketId, int]] = []  # (first serial, epoch) of each epoch with samples to deliver
        self._ready: list[TicketSpan] = []  # ready and in no batch, sorted, never touching
        self._counts: dict[int, int] = {}  # epoch -> samples ready and in no batch
        self._failed: set[TicketId] = set()
        self._in_place_of: dict[TicketId, TicketId] = {}  # ready serials that have changed places, each with the other
        self._next = OutputBatch(0)

    def resume(self, order: OutputBatch) -> None:
        """The batches before ``order`` were delivered by an earlier run."""
        self._next = order

    def admit(self, place: Place, batch: int) -> None:
        """A place was admitted; they come in the sampler's order. ``batch``: samples of the batch of its number."""
        if batch:
            self._due.append((place.epoch, batch))
        if not self._starts or self._starts[-1][1] != place.epoch:
            while self._starts and self._due and self._starts[0][1] != self._due[0][0]:
                del self._counts[self._starts.pop(0)[1]]  # all of that epoch is in batches
            self._starts.append((place.first, place.epoch))
            self._counts[place.epoch] = 0

    def finished(self, span: TicketSpan, failed: tuple[TicketId, ...], complete: list[Place]) -> None:
        """``span`` is ready, ``failed`` of it as errors."""
        self._failed.update(failed)
        self._count(span)
        lo, hi = span
        at = bisect_right(self._ready, span)
        if at < len(self._ready) and self._ready[at][0] == hi:
            hi = self._ready.pop(at)[1]
        if at and self._ready[at - 1][1] == lo:
            lo = self._ready.pop(at - 1)[0]
        insort(self._ready, (lo, hi))

    def compose(self, eager: bool) -> Compose | None:
        """The next batch, or None."""
        if not self._due or self._counts[self._due[0][0]] < self._due[0][1]:
            return None
        oldest = self._places.oldest
        epoch, size = self._due[0]
        overtakes = oldest is not None and oldest.first < self._ready[0][0] + size
        if overtakes and (not eager or self.held_back):
            return None
        if self._spreads and self._failed and not self._has_survivor(epoch, size):
            return None
        return self._take(epoch, size)

    @property
    def missing(self) -> int:
        """How many samples the next batch needs beside those that are ready."""
        return self._due[0][1] - self._counts[self._due[0][0]] if self._due else 0

    @property
    def held_back(self) -> bool:
        """Whether a sample that must be in the next batch is not ready."""
        oldest = self._places.oldest
        return oldest is not None and oldest.number <= self._next - self._lateness

    def _count(self, span: TicketSpan) -> None:
        """Add the span to its epochs' counts."""
        lo, hi = span
        for start, epoch in reversed(self._starts):
            if start < hi:
                self._counts[epoch] += hi - max(lo, start)
                hi = start
            if hi <= lo:
                break

    def _has_survivor(self, epoch: int, size: int) -> bool:
        """Whether not all of the next batch has failed, or cannot be helped; False: it is worth waiting."""
        end = next((start for start, later in self._starts if later > epoch), None)
        ready = (serial for serial in tickets(self._ready) if end is None or serial < end)
        youngest = TicketId(-1)
        for at, serial in enumerate(ready):
            if self._in_place_of.get(serial, serial) not in self._failed:
                if at >= size:
                    swapped = self._in_place_of
                    one, other = swapped.get(youngest, youngest), swapped.get(serial, serial)
                    swapped[youngest], swapped[serial] = other, one
                return True
            youngest = serial if at < size else youngest
        oldest = self._places.oldest
        return oldest is None or oldest.epoch != epoch

    def _real(self, spans: list[TicketSpan]) -> list[TicketSpan]:
        """The spans with those in them that have changed places."""
        swapped, out = self._in_place_of, list[TicketSpan]()
        for serial in sorted(swapped.pop(each, each) for each in tickets(spans)):
            if out and out[-1][1] == serial:
                out[-1] = (out[-1][0], TicketId(serial + 1))
            else:
                out.append((serial, TicketId(serial + 1)))
        return out

    def _take(self, epoch: int, need: int) -> Compose:
        self._counts[epoch] -= need
        spans: list[TicketSpan] = []
        while need:
            lo, hi = self._ready[0]
            upto = min(hi, TicketId(lo + need))
            spans.append((lo, upto))
            need -= upto - lo
            if upto == hi:
                self._ready.pop(0)
            else:
                self._ready[0] = (upto, hi)
        self._due.popleft()
        order, self._next = self._next, OutputBatch(self._next + 1)
        if self._in_place_of:
            spans = self._real(spans)
        failed = tuple(s for s in self._failed if any(lo <= s < hi for lo, hi in spans)) if self._failed else ()
        self._failed.difference_update(failed)
        return Compose(order, tuple(spans), failed)
