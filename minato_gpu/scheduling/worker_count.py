"""How many workers are at work, between two limits: decisions only, told the time.

More are tried while the consumer waits for samples to be prepared and every worker is busy, whatever the reason: costs
that nobody predicted, or too few workers. Whether cores are free for them, and what they take from the training
process, is not asked but tried: a step up that has not brought a quarter of what it would at best is taken back, and
tried again later. Workers that have had nothing to do for a while are sent to rest.

MinatoLoader (EuroSys 2026) moves its number of workers by the fill of a queue and the load of the processor. Rejected
here: both say that something is short, and neither that more workers would help.
"""

from __future__ import annotations

from math import ceil

_SHORTEST_S, _BATCHES = 0.5, 8  # an interval has at least so many seconds, and batches
_SHORT = ("preparation", "lateness", "slow sample")  # causes of a wait that more workers might end
_WAITS = 0.05  # share of an interval that the consumer waits, from which on more would be better
_CONTENT = 0.01  # and below which nothing is short
_IDLE = 0.1  # share of the workers
_STEP = 1.5
_PAYS = 0.25  # of what a step up brings at best
_SPARE = 1.5  # workers that are idle on average, where fewer would do
_SETTLES_S = 0.5  # what is delivered before was mostly begun by those that were there
_HOLD_S, _LONGEST_HOLD_S = 2.0, 60.0


class WorkerCount:
    """``workers``: how many should be at work, at least ``least`` and at most ``most``."""

    def __init__(self, least: int, most: int) -> None:
        self.workers = self.least = least
        self.most = most
        self._tried_from: tuple[int, float] | None = None  # workers, and samples a second, before the last step up
        self._settled_at = 0.0  # an interval that begins before says nothing about the last step up
        self._hold_until, self._hold_s = 0.0, _HOLD_S
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """An epoch begins."""
        self._since = now
        self._batches = self._samples = 0
        self._waited_s = self._idle = 0.0

    def waited(self, cause: str, seconds: float) -> None:
        """The consumer has waited for its next batch."""
        if cause in _SHORT:
            self._waited_s += seconds

    def delivered(self, now: float, samples: int, idle: int) -> bool:
        """A batch was delivered, and ``idle`` workers have nothing to do. Returns whether there should be more or fewer
        at work from now on."""
        before = self.workers
        self._batches += 1
        self._samples += samples
        self._idle += idle
        elapsed = now - self._since
        if self._batches >= _BATCHES and elapsed >= _SHORTEST_S:
            self._decide(now, self._samples / elapsed, self._waited_s / elapsed, self._idle / self._batches)
            self.begin(now)
        return self.workers != before

    def _decide(self, now: float, rate: float, waits: float, idle: float) -> None:
        if self._since < self._settled_at:
            return
        if self._tried_from is not None and not self._paid(now, rate):
            return
        if now < self._hold_until:
            return
        if waits > _WAITS and idle <= _IDLE * self.workers and self.workers < self.most:
            self._tried_from = self.workers, rate
            self.workers, self._settled_at = min(self.most, ceil(_STEP * self.workers)), now + _SETTLES_S
        elif waits < _CONTENT and idle > _SPARE and self.workers > self.least:
            self.workers = max(self.least, self.workers - int(idle))
            self._hold_until = now + _HOLD_S

    def _paid(self, now: float, rate: float) -> bool:
        """Whether the last step up has brought enough; else it is taken back."""
        assert self._tried_from is not None
        workers, before = self._tried_from
        self._tried_from = None
        if rate >= before * (1 + _PAYS * (self.workers / workers - 1)):
            self._hold_s = _HOLD_S
            return True
        self.workers, self._hold_until = workers, now + self._hold_s
        self._hold_s = min(2 * self._hold_s, _LONGEST_HOLD_S)
        return False
