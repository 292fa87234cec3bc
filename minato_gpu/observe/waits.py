"""The training loop's waits for batches: their causes, and the sample that was ready last."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappush, heapreplace
from typing import NamedTuple, Protocol

from minato_gpu.samples import JSON, Key, TicketId
from minato_gpu.scheduling.spans import TicketSpan

_LONGEST = 10
_ARRIVALS = 256  # reports that are remembered of a wait: the last ones


Arrival = tuple[str, int, Sequence[TicketSpan]]
"""A lane's report of samples that are ready: the lane's name, the worker, and the tickets."""


class Tickets(Protocol):
    """Neighbouring tickets and their keys."""

    @property
    def first(self) -> TicketId:
        """The first ticket."""

    @property
    def keys(self) -> Sequence[Key]:
        """The data set's key of each ticket."""


class Last(NamedTuple):
    """The sample of a batch that was ready last, and the slot and lane that prepared it; None where nobody knows."""

    key: Key
    lane: str | None
    worker: int | None


class Wait:
    """A wait for a batch. It began at ``begin`` (seconds of ``perf_counter``) for ``cause``, with ``tickets`` in the
    window."""

    def __init__(self, begin: float, cause: str, tickets: Sequence[Tickets] = ()) -> None:
        self.begin = self._since = begin
        self.looked = begin  # when the cause was asked for last
        self.parts: list[tuple[str, float, float]] = []  # one after the other: cause, begin and end
        self.arrivals: deque[Arrival] = deque(maxlen=_ARRIVALS)  # reported by lanes since it began
        self._cause, self._tickets = cause, tickets

    def look(self, now: float, cause: str) -> None:
        """Notes the present cause. The time since the last look counts for the cause of then."""
        self.looked = now
        if cause != self._cause:
            self.parts.append((self._cause, self._since, now))
            self._cause, self._since = cause, now

    def end(self, now: float) -> None:
        """Ends the wait."""
        self.parts.append((self._cause, self._since, now))

    def by_cause(self) -> dict[str, float]:
        """Returns the seconds for each cause."""
        found: dict[str, float] = {}
        for cause, begin, end in self.parts:
            found[cause] = found.get(cause, 0.0) + end - begin
        return found

    def last_of(self, spans: Sequence[TicketSpan]) -> Last | None:
        """Returns the last sample of these tickets that became ready; None if all were ready when the wait began."""
        for lane, worker, arrived in reversed(self.arrivals):
            found = [min(hi, end) for lo, hi in arrived for begin, end in spans if max(lo, begin) < min(hi, end)]
            if found:
                return Last(self._key(TicketId(max(found) - 1)), lane, worker)
        return None

    def _key(self, ticket: TicketId) -> Key:
        """Returns the ticket's key; None if the ticket was admitted during the wait."""
        keys = (each.keys[ticket - each.first] for each in self._tickets if 0 <= ticket - each.first < len(each.keys))
        return next(keys, None)


class LongestWaits:
    """The ten longest waits of an epoch."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, dict[str, JSON]]] = []
        self._number = 0

    def add(self, wait: Wait, batch: int, spans: Sequence[TicketSpan]) -> None:
        """Adds a wait for batch number ``batch`` of the epoch, which consists of the tickets ``spans``."""
        seconds = wait.parts[-1][2] - wait.begin
        if len(self._heap) == _LONGEST and seconds <= self._heap[0][0]:
            return
        last = wait.last_of(spans) or Last(None, None, None)
        entry = {"batch": batch, "seconds": seconds, "causes": wait.by_cause(), **last._asdict()}
        self._number += 1
        put = heappush if len(self._heap) < _LONGEST else heapreplace
        put(self._heap, (seconds, -self._number, entry))

    def stats(self) -> list[dict[str, JSON]]:
        """Returns the waits as plain data, the longest first."""
        return [entry for *_, entry in sorted(self._heap, reverse=True)]
