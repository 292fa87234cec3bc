"""How many reads are under way at once: decisions only, told the time.

Little's law says how many must be for a rate and a latency: rate x latency. Neither is known before, and both change,
so the limit is doubled while that pays: where too little is there, and reads wait although as many are under way as may
be. A step that has not brought 10 % more is taken back, because then the storage is at its own limit and only queues.
It is tried again later.

Where much of what is wanted is there already, few reads are under way, in order of need. Several readers, such as the
ranks of a training, may share a storage, and all that one sends for later is answered before what another one needs
next: four ranks that each missed a fifth of an epoch took 1.6 times as long when each sent all of it at once.
"""

from __future__ import annotations

_PAYS = 1.1
_STEP = 2
_HOLD_S, _LONGEST_HOLD_S = 1.0, 8.0
_SHORTEST_S = 0.05
_LATER = 2.0  # a latency that grows by this factor by itself: nothing that was learned is worth anything
_AT_LEISURE = 8  # as many keep a buffer of 256 at half through the slowest in a hundred, at 667/s and 100 ms
_OTHERWISE = 1.5  # where the storage only queues, latency grows as the limit does, and not by this much more


class Concurrency:
    """``limit``: reads that may be under way."""

    def __init__(self, start: int = 16, most: int = 1024) -> None:
        self.limit = start
        self.latency_s = 0.0  # mean of the last interval
        self._most = most
        self._since: float | None = None
        self._count = 0
        self._seconds = 0.0
        self._full = True  # all through the interval too little was there, and reads have waited
        self._before: tuple[int, float, float] | None = None  # limit, rate and latency before the last step
        self._hold_until = 0.0
        self._hold_s = _HOLD_S

    @property
    def at_its_limit(self) -> bool:
        """Whether more reads at once have brought nothing: the storage gives no more."""
        return self._hold_until > 0.0

    def allowed(self, *, behind: bool) -> int:
        """How many reads may be under way now; ``behind``: whether little of what is wanted is there."""
        return self.limit if behind else min(self.limit, _AT_LEISURE)

    def finished(self, now: float, latency_s: float, *, full: bool) -> None:
        """A read has ended; ``full``: more at once would help."""
        if self._since is None:
            self._since = now - latency_s
        self._count += 1
        self._seconds += latency_s
        self._full = self._full and full
        elapsed = now - self._since
        if elapsed >= _SHORTEST_S and self._count >= min(self.limit, 64) and elapsed >= self._seconds / self._count:
            self._evaluate(now, self._count / elapsed, self._seconds / self._count)
            self._since, self._count, self._seconds, self._full = now, 0, 0.0, True

    def _evaluate(self, now: float, rate: float, latency_s: float) -> None:
        slower, first = latency_s > _LATER * self.latency_s > 0.0, self.latency_s == 0.0
        self.latency_s = latency_s
        if first:  # in which connections were made, and nothing came for as long as the first answer took
            return
        if not self._full:
            self._before, self._hold_until = None, 0.0  # it gives what is wanted
            return
        if self._before is not None:
            limit, rate_before, latency_before = self._before
            self._before = None
            queues = latency_s < _OTHERWISE * latency_before * self.limit / limit  # else the storage has become slower
            if rate < _PAYS * rate_before and queues:
                self.limit, self._hold_until = limit, now + self._hold_s
                self._hold_s = min(2 * self._hold_s, _LONGEST_HOLD_S)
                return
            self._hold_until, self._hold_s = 0.0, _HOLD_S
        if slower:
            self._hold_until, self._hold_s = 0.0, _HOLD_S
        if now >= self._hold_until and self.limit < self._most:
            self._before = self.limit, rate, latency_s
            self.limit = min(self._most, _STEP * self.limit)
