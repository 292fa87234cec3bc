"""The log of an epoch: counters, times and the timeline, in bounded memory.

Rooms report what happens; the log counts, and publishes facts (facts.py) where there are subscribers. Times are in
seconds of ``perf_counter``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from time import perf_counter

import numpy as np

from minato_gpu.lanes.base import Report
from minato_gpu.observe import facts as f
from minato_gpu.observe.waits import LongestWaits, Wait
from minato_gpu.samples import JSON
from minato_gpu.scheduling.spans import Span

_RING = 1 << 14


class LaneLog:
    """Counts of one lane in one epoch."""

    def __init__(self) -> None:
        self.slots = 0
        self.samples = 0  # prepared
        self.handed = 0  # begun here and finished on another lane
        self.busy_s = 0.0  # seconds of all slots at work, while the epoch ran
        self.queue_s: deque[float] = deque(maxlen=_RING)  # of each report: from its dispatch to its begin
        self.service_s: deque[float] = deque(maxlen=_RING)  # of each report: mean of its samples


class Telemetry:
    """Counters of one epoch as it runs; ``stats`` and ``timeline`` present them. Percentiles and timeline are of the
    last 16,384 entries."""

    def __init__(self, begin: float, number: int = 0, facts: f.Facts = f.NO_SUBSCRIBERS) -> None:
        self._number, self.facts = number, facts
        self.expected: int | None = None  # samples; None: not known
        self.begin = begin
        self.end: float | None = None
        self.samples = self.batches = self.failed = self.skipped = self.repeated = self.padded = 0
        self.workers = {"died": 0, "hung": 0, "replaced": 0}
        self.first_batch_s: float | None = None
        self.lanes: dict[str, LaneLog] = defaultdict(LaneLog)
        self.waits: deque[float] = deque(maxlen=_RING)
        self.wait_s = 0.0
        self.stalls: dict[str, list[float]] = {}  # by cause: waits that were for this one longest, and seconds
        self.longest_waits = LongestWaits()  # for batches
        self.lateness: deque[int] = deque(maxlen=_RING)
        self.spans: deque[tuple[float, float, str, int, int, int, int, float]] = deque(maxlen=_RING)
        self.deliveries: deque[tuple[float, int, int, int, float]] = deque(maxlen=_RING)

    def began(self, expected: int | None, now: float) -> None:
        """Notes that the training loop begins the epoch, parts of which may have been prepared before."""
        self.expected, self.begin = expected, now
        if self.facts.subscribers:
            self.facts.publish(f.EpochBegan(self._number, now, expected))

    def asked(self, now: float) -> None:
        """Notes that the training loop asks for its next batch. Needs no call where there are no subscribers."""
        self.facts.publish(f.BatchAsked(self._number, now))

    def ended(self, now: float) -> None:
        """Notes that the training loop has seen the end of the epoch."""
        self.end = now
        if self.facts.subscribers:
            self.facts.publish(f.EpochEnded(self._number, now))

    def left(self) -> None:
        """Notes that the training loop has dropped the epoch's iterator, perhaps in the middle. No more time is
        counted."""
        self.end = self.end or perf_counter()

    def worked(
        self,
        lane: str,
        report: Report,
        count: int,
        positions: Sequence[Span],
        sent: float,
        *,
        prepared: bool,
        handed: int = 0,
        failed: int = 0,
    ) -> None:
        """Counts a lane's work on ``count`` samples of this epoch, in a chunk that was sent to it at ``sent``.

        ``positions``: theirs, if they have any. ``prepared`` is False for reads for another lane, and for a job that
        had only to join (a ``count`` of 1). ``handed`` of the samples went on to another lane, and ``failed`` failed.
        """
        log = self.lanes[lane]
        each = report.seconds / max(count, 1)
        begin, end = _span(report)
        self.repeated += report.repeated
        if prepared:
            log.samples += count - handed - failed
            log.handed += handed
        if prepared and count:
            log.queue_s.append(max(0.0, report.begin - sent))
            log.service_s.append(each)
        position = positions[0][0] if positions else -1
        self.spans.append((begin, end, lane, report.worker, self._number, position, count, each))
        if self.facts.subscribers:
            where = self._number, lane, report.worker, positions, count
            self.facts.publish(f.Worked(*where, sent, begin, end, report.ends, prepared, handed))

    def kept_busy(self, lane: str, report: Report) -> None:
        """Counts the part of a lane's work, on samples of any epoch, that fell into this epoch's time.

        Much of an epoch may be prepared while the one before it still runs, and takes none of its own time.
        """
        begin, end = _span(report)
        meanwhile = min(end, self.end or end) - max(begin, self.begin)
        self.lanes[lane].busy_s += max(0.0, min(report.seconds, meanwhile))

    def died(self, *, hung: bool) -> None:
        """Counts a worker that ended and should not have; ``hung``: it was killed, because it had hung."""
        self.workers["hung" if hung else "died"] += 1
        if self.facts.subscribers:
            self.facts.publish(f.Died(self._number, perf_counter(), hung))

    def lost(self, failed: int, skipped: int) -> None:
        """Counts samples of a batch that are not delivered: ``failed`` of them have failed, and ``skipped`` others are
        lost with a batch that raises."""
        self.failed += failed
        self.skipped += skipped
        if self.facts.subscribers:
            self.facts.publish(f.Failed(self._number, perf_counter(), failed, skipped))

    def in_vain(self, prepared: int) -> None:
        """Counts samples that were prepared on the training loop's thread, and whose batch was not delivered."""
        self.lanes["cpu"].samples += prepared

    def delivered(
        self,
        now: float,
        number: int,
        size: int,
        wait: float,
        late: Iterable[int],
        padded: int = 0,
        positions: Sequence[Span] = (),
    ) -> None:
        """Counts batch ``number`` of the epoch, delivered to the training loop, which had waited ``wait`` seconds.

        ``late``: by how many batches samples came after their place, of each run of neighbours the first and the last.
        ``padded``: repeated samples, which ``size`` does not count.
        """
        if self.first_batch_s is None:
            self.first_batch_s = now - self.begin
        self.samples += size
        self.padded += padded
        self.batches += 1
        self.waits.append(wait)
        self.wait_s += wait
        self.lateness.extend(late)
        self.deliveries.append((now, self._number, number, size + padded, wait))
        if self.facts.subscribers:
            self.facts.publish(f.BatchDelivered(self._number, now, number, size, padded, wait, positions))

    def inline(
        self, begin: float, end: float, number: int, size: int, padded: int = 0, positions: Sequence[Span] = ()
    ) -> None:
        """Counts batch ``number`` as prepared on the training loop's thread, without workers, and as delivered: the
        loop waited from ``begin`` to ``end``."""
        log, took = self.lanes["cpu"], end - begin
        log.samples += size
        log.busy_s += took
        position, each = positions[0][0] if positions else self.samples, took / size if size else took
        log.service_s.append(each)
        self.spans.append((begin, end, "cpu", 0, self._number, position, size, each))
        if self.facts.subscribers:
            where = self._number, "cpu", 0, positions, size
            self.facts.publish(f.Worked(*where, begin, begin, end, None, True, 0))
        self.delivered(end, number, size, took, (0,), padded, positions)

    def stalled(self, wait: Wait) -> None:
        """Counts a wait of the training loop for a batch, or for the end of the epoch: its seconds by cause, and once
        for the cause that took longest."""
        if self.facts.subscribers:
            for part in wait.parts:
                self.facts.publish(f.Stalled(self._number, *part))
        by_cause = wait.by_cause()
        for cause, seconds in by_cause.items():
            self.stalls.setdefault(cause, [0, 0.0])[1] += seconds
        self.stalls[max(by_cause, key=by_cause.__getitem__)][0] += 1

    def stats(self, now: float) -> dict[str, JSON]:
        """Returns the counters as plain data (see ``DataLoader.stats``)."""
        elapsed = max((self.end or now) - self.begin, 1e-9)
        return {
            "samples_expected": self.expected,
            "samples_delivered": self.samples,
            "samples_failed": self.failed,
            "samples_skipped": self.skipped,
            "samples_padded": self.padded,
            "samples_repeated": self.repeated,
            "workers": dict(self.workers),
            "batches_delivered": self.batches,
            "elapsed_s": elapsed,
            "first_batch_s": self.first_batch_s,
            "lanes": {
                name: {
                    "samples": log.samples,
                    "handed_over": log.handed,
                    "slots": log.slots,
                    "busy_share": log.busy_s / (elapsed * max(log.slots, 1)),
                    "queue_s": percentiles(log.queue_s),
                    "service_s": percentiles(log.service_s),
                }
                for name, log in list(self.lanes.items())
            },
            "wait_s": {**percentiles(self.waits), "total": self.wait_s},
            "stalls": {cause: {"count": int(n), "seconds": s} for cause, (n, s) in list(self.stalls.items())},
            "longest_waits": self.longest_waits.stats(),
            "lateness": {**percentiles(self.lateness), "max": float(max(self.lateness, default=0))},
        }

    def timeline(self) -> dict[str, JSON]:
        """Returns what each slot did and when batches were delivered, in seconds since the epoch began (see
        ``DataLoader.timeline``)."""
        spans, deliveries = list(self.spans), list(self.deliveries)  # copied at once: reports come in meanwhile
        typical = float(np.median([span[7] for span in spans])) if spans else 0.0
        return {
            "spans": [
                (begin - self.begin, end - self.begin, lane, slot, epoch, position, count, each > 4 * typical)
                for begin, end, lane, slot, epoch, position, count, each in spans
            ],
            "batches": [(at - self.begin, *rest) for at, *rest in deliveries],
        }


def _span(report: Report) -> tuple[float, float]:
    """Returns when the work of a report began and ended.

    A later report of a chunk begins where the one before it ended.
    """
    return (report.begin if report.first == 0 else report.end - report.seconds), report.end


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Returns median, 95th and 99th percentile; zeros if there are no values."""
    data = np.fromiter(values, dtype=np.float64)
    if data.size == 0:
        return {"p50": 0.0, "p95": 0.0, "p99": 0.0}
    p50, p95, p99 = np.percentile(data, [50, 95, 99])
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99)}
