"""``WorkerCount``: adapts the number of workers at work between two limits. Pure; the caller tells the time.

More workers are tried while the consumer waits for preparation or slow samples, and at most a tenth of the workers is
idle. Whether cores are free, and what more workers take from the training process, is found by trial: a step up that
brings less than a quarter of the ideal gain is reverted, and tried again later. Workers that have been idle for a while
are rested.

MinatoLoader (EuroSys 2026) adapts its workers by the fill of a queue and the processor's load. Rejected here: both show
that something is short, and neither that more workers would help.
"""

from __future__ import annotations

from math import ceil

_SHORTEST_S, _BATCHES = 0.5, 8  # least seconds and batches of an interval
_WORKER_CAUSES = ("preparation", "lateness", "slow sample")  # causes of waiting that more workers might end
_WAITING_SHARE = 0.05  # share of an interval that the consumer waits, above which more workers are tried
_CONTENT_SHARE = 0.01  # share below which workers may rest
_IDLE_SHARE = 0.1  # share of workers that may be idle when more are tried
_STEP = 1.5  # factor of a step up
_LEAST_GAIN = 0.25  # of the ideal gain of a step up
_SPARE_WORKERS = 1.5  # mean idle workers above which some rest
_SETTLES_S = 0.5  # after a step up; earlier deliveries were begun by fewer workers
_HOLD_S, _LONGEST_HOLD_S = 2.0, 60.0  # until the next change


class WorkerCount:
    """Number of ``workers`` that should be at work, from ``least`` to ``most``."""

    def __init__(self, least: int, most: int) -> None:
        self.workers = self.least = least
        self.most = most
        self._tried_from: tuple[int, float] | None = None  # workers and samples/s before the last step up
        self._settled_at = 0.0  # intervals that begin before tell nothing about the last step up
        self._hold_until, self._hold_s = 0.0, _HOLD_S
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Begins an interval: at the start of an epoch, and after each decision."""
        self._since = now
        self._batches = self._samples = 0
        self._waited_s = self._idle = 0.0

    def waited(self, cause: str, seconds: float) -> None:
        """Adds seconds that the consumer waited for its next batch; a ``cause`` that more workers cannot end counts
        not."""
        if cause in _WORKER_CAUSES:
            self._waited_s += seconds

    def delivered(self, now: float, samples: int, idle: int) -> bool:
        """Records a delivery of ``samples`` samples while ``idle`` workers had nothing to do. Returns True when
        ``workers`` has changed."""
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
        if self._tried_from is not None and not self._paid_off(now, rate):
            return
        if now < self._hold_until:
            return
        if waits > _WAITING_SHARE and idle <= _IDLE_SHARE * self.workers and self.workers < self.most:
            self._tried_from = self.workers, rate
            self.workers, self._settled_at = min(self.most, ceil(_STEP * self.workers)), now + _SETTLES_S
        elif waits < _CONTENT_SHARE and idle > _SPARE_WORKERS and self.workers > self.least:
            self.workers = max(self.least, self.workers - int(idle))
            self._hold_until = now + _HOLD_S

    def _paid_off(self, now: float, rate: float) -> bool:
        """Reverts the last step up unless it has brought enough. Returns whether it has."""
        assert self._tried_from is not None
        workers, before = self._tried_from
        self._tried_from = None
        if rate >= before * (1 + _LEAST_GAIN * (self.workers / workers - 1)):
            self._hold_s = _HOLD_S
            return True
        self.workers, self._hold_until = workers, now + self._hold_s
        self._hold_s = min(2 * self._hold_s, _LONGEST_HOLD_S)
        return False
