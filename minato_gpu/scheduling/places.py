"""The window's batches: which samples are still missing, and what the next batch to deliver consists of.

Two rules of composition. *Fixed*: a batch is what the sampler put together; it is complete when its last
sample is. *Free*: a batch takes the oldest ready samples of its epoch, whatever their place, but never leaves
out one whose place is ``max_lateness`` batches back (promise P3).

Why free composition can always keep that promise: before batch n is composed, every sample of the places up
to n - 1 - lateness has been delivered, so all that must be in batch n belong to place n - lateness, and a batch
has room for one place. (Batch n has the size of place n, and epochs never mix.)
"""

from __future__ import annotations

from bisect import bisect_right, insort
from heapq import heappop, heappush

from minato_gpu.scheduling.messages import Compose, Span


class Place:
    """One batch of the sampler's order: serials ``first`` to ``end``, of which ``missing`` are not ready."""

    __slots__ = ("end", "epoch", "failed", "first", "missing", "number")

    def __init__(self, number: int, epoch: int, first: int, size: int) -> None:
        self.number = number
        self.epoch = epoch
        self.first = first
        self.end = first + size
        self.missing = size
        self.failed: list[int] = []


class Places:
    """The admitted places that are not complete, oldest first."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._firsts: list[int] = []

    def admit(self, place: Place) -> None:
        """Places come in rising order of serials."""
        self._places.append(place)
        self._firsts.append(place.first)

    @property
    def oldest(self) -> Place | None:
        """The oldest place that misses a sample."""
        return self._places[0] if self._places else None

    def end_of(self, serial: int) -> int:
        """The end of the incomplete place that holds ``serial``."""
        return self._places[bisect_right(self._firsts, serial) - 1].end

    def finish(self, span: Span, failed: tuple[int, ...] = ()) -> list[Place]:
        """The samples of ``span`` are ready (``failed`` of them as errors); returns the places now complete."""
        lo, hi = span
        complete: list[Place] = []
        at = bisect_right(self._firsts, lo) - 1
        while lo < hi:
            place = self._places[at]
            upto = min(hi, place.end)
            place.missing -= upto - lo
            if failed:
                place.failed.extend(serial for serial in failed if lo <= serial < upto)
            if place.missing:
                at += 1
            else:
                del self._places[at], self._firsts[at]
                complete.append(place)
            lo = upto
        return complete


class FixedComposition:
    """Batches as the sampler composed them, delivered at most ``lateness`` batches late (0: in its order)."""

    def __init__(self, places: Places, lateness: int) -> None:
        self._places = places
        self._lateness = lateness
        self._epochs: dict[int, int] = {}  # number -> epoch, from the next order on
        self._complete: list[tuple[int, Place]] = []
        self._next = 0

    def admit(self, place: Place) -> None:
        if self._lateness:
            self._epochs[place.number] = place.epoch

    def finished(self, span: Span, failed: tuple[int, ...], complete: list[Place]) -> list[Compose]:
        """What can be composed now that ``span`` is ready and ``complete`` have become complete."""
        if not self._lateness:
            return [self._compose(place.number, place) for place in complete]
        for place in complete:
            heappush(self._complete, (place.number, place))
        return self._release()

    def asked(self) -> list[Compose]:
        """Nothing waits for the consumer's question: a complete batch is composed at once."""
        return []

    @property
    def held_back(self) -> bool:
        """Whether complete batches wait because an older one must come first."""
        return bool(self._complete)

    def _release(self) -> list[Compose]:
        out: list[Compose] = []
        while self._complete and self._epochs.get(self._next) == self._complete[0][1].epoch:
            oldest, number = self._places.oldest, self._complete[0][0]
            if oldest is not None and oldest.number < number and oldest.number <= self._next - self._lateness:
                break
            out.append(self._compose(self._next, heappop(self._complete)[1]))
            del self._epochs[self._next]
            self._next += 1
        return out

    @staticmethod
    def _compose(order: int, place: Place) -> Compose:
        return Compose(order, ((place.first, place.end),), tuple(place.failed))


class FreeComposition:
    """Batches of whatever is ready, oldest first, at most ``lateness`` batches after its place."""

    def __init__(self, places: Places, lateness: int) -> None:
        self._places = places
        self._lateness = lateness
        self._due: dict[int, Place] = {}  # number -> place that gives batch number's size and epoch
        self._starts: dict[int, int] = {}  # epoch -> its first serial
        self._ready: list[Span] = []  # ready and not composed, sorted, never touching
        self._counts: dict[int, int] = {}  # epoch -> ready and not composed
        self._failed: set[int] = set()
        self._next = 0

    def admit(self, place: Place) -> None:
        self._due[place.number] = place
        self._starts.setdefault(place.epoch, place.first)

    def finished(self, span: Span, failed: tuple[int, ...], complete: list[Place]) -> list[Compose]:
        """A batch of the sampler's own order is composed as soon as it is ready; others wait to be asked for."""
        self._add(span)
        self._failed.update(failed)
        out: list[Compose] = []
        while (place := self._due.get(self._next)) is not None:
            oldest, lo = self._places.oldest, self._ready[0][0] if self._ready else None
            if lo is None or not self._enough(place) or (oldest is not None and oldest.first < lo + _size(place)):
                break
            out.append(self._take(place))
        return out

    def asked(self) -> list[Compose]:
        """The consumer waits: compose the next batch from what is ready, if lateness allows."""
        place = self._due.get(self._next)
        if place is None or not self._enough(place) or self.held_back:
            return []
        return [self._take(place)]

    @property
    def held_back(self) -> bool:
        """Whether a sample that must be in the next batch is not ready."""
        oldest = self._places.oldest
        return oldest is not None and oldest.number <= self._next - self._lateness

    def _enough(self, place: Place) -> bool:
        return self._counts.get(place.epoch, 0) >= _size(place)

    def _add(self, span: Span) -> None:
        lo, hi = span
        for epoch, start in reversed(self._starts.items()):
            if start < hi:
                self._counts[epoch] = self._counts.get(epoch, 0) + hi - max(lo, start)
                hi = min(hi, start)
            if hi <= lo:
                break
        lo, hi = span
        at = bisect_right(self._ready, span)
        if at < len(self._ready) and self._ready[at][0] == hi:
            hi = self._ready.pop(at)[1]
        if at and self._ready[at - 1][1] == lo:
            lo = self._ready.pop(at - 1)[0]
        insort(self._ready, (lo, hi))

    def _take(self, place: Place) -> Compose:
        need, spans = _size(place), []
        while need:
            lo, hi = self._ready[0]
            upto = min(hi, lo + need)
            spans.append((lo, upto))
            need -= upto - lo
            if upto == hi:
                self._ready.pop(0)
            else:
                self._ready[0] = (upto, hi)
        self._counts[place.epoch] -= _size(place)
        del self._due[self._next]
        order, self._next = self._next, self._next + 1
        failed = tuple(s for s in self._failed if any(lo <= s < hi for lo, hi in spans)) if self._failed else ()
        self._failed.difference_update(failed)
        return Compose(order, tuple(spans), failed)


def _size(place: Place) -> int:
    return place.end - place.first
