"""The training loop's waits for batches: for which causes, and for which sample last."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappush, heapreplace
from typing import NamedTuple

from minato_gpu.samples import JSON, Key, TicketId
from minato_gpu.scheduling.messages import TicketSpan

_LONGEST = 10
_ARRIVALS = 256  # reports that are remembered of a wait: the last ones


class Arrival(NamedTuple):
    """A lane's report of samples that are ready. ``parts``: their tickets by place, each part with the keys of all of
    the place's tickets, and the first of these."""

    lane: str
    worker: int
    parts: Sequence[tuple[Sequence[Key], TicketId, TicketId, TicketId]]


class Last(NamedTuple):
    """The sample of a batch that was ready last, and which slot of which lane prepared it; None where nobody knows."""

    key: Key
    lane: str | None
    worker: int | None


class Wait:
    """A wait that began at ``begin`` for ``cause``; ``arrivals``: what lanes have reported since."""

    def __init__(self, begin: float, cause: str) -> None:
        self.begin = self._since = begin
        self.parts: list[tuple[str, float, float]] = []  # one after the other: cause, begin and end
        self.arrivals: deque[Arrival] = deque(maxlen=_ARRIVALS)
        self._cause = cause

    def look(self, now: float, cause: str) -> None:
        """Note for which cause it goes on; what passed since the last look counts for the cause of then."""
        if cause != self._cause:
            self.end(now)
            self._cause, self._since = cause, now

    def end(self, now: float) -> None:
        """The wait, or its part for one cause, is over."""
        self.parts.append((self._cause, self._since, now))

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.parts[-1][2] - self.begin

    def by_cause(self) -> dict[str, float]:
        """Seconds for each cause."""
        found: dict[str, float] = {}
        for cause, begin, end in self.parts:
            found[cause] = found.get(cause, 0.0) + end - begin
        return found

    def last_of(self, spans: Sequence[TicketSpan]) -> Last | None:
        """The last arrival of these tickets; None where all had been ready before, and waited for something else."""
        for lane, worker, parts in reversed(self.arrivals):
            for keys, first, lo, hi in reversed(parts):
                found = [min(hi, stop) - 1 for start, stop in spans if max(lo, start) < min(hi, stop)]
                if found:
                    return Last(keys[max(found) - first], lane, worker)
        return None


class LongestWaits:
    """The ten longest of an epoch."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, dict[str, JSON]]] = []
        self._number = 0

    def add(self, wait: Wait, batch: int, spans: Sequence[TicketSpan]) -> None:
        """A wait for this batch of the epoch, which consists of these tickets."""
        seconds = wait.seconds
        if len(self._heap) == _LONGEST and seconds <= self._heap[0][0]:
            return
        last = wait.last_of(spans) or Last(None, None, None)
        entry = {"batch": batch, "seconds": seconds, "causes": wait.by_cause(), **last._asdict()}
        self._number += 1
        put = heappush if len(self._heap) < _LONGEST else heapreplace
        put(self._heap, (seconds, -self._number, entry))

    def stats(self) -> list[dict[str, JSON]]:
        """The longest first."""
        return [entry for *_, entry in sorted(self._heap, reverse=True)]
