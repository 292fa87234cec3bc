"""Between the consumer and what decides how many workers are at work: what it is told, and what follows."""

from __future__ import annotations

from minato_gpu.lanes.contract import Lane
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.scheduling.worker_count import WorkerCount

_SHORT = ("preparation", "lateness")  # causes of a wait that more workers might end


class WorkerCounting:
    """Of one engine. ``lane``: whose workers they are."""

    def __init__(self, count: WorkerCount, lane: Lane) -> None:
        self._count, self._lane = count, lane
        self._waited_s = 0.0

    def begin(self, now: float, log: Telemetry) -> None:
        """An epoch begins."""
        self._count.begin(now)
        log.workers["at_work"] = self._count.workers

    def waited(self, cause: str, seconds: float) -> None:
        """The consumer has waited for its next batch."""
        if cause in _SHORT:
            self._waited_s += seconds

    def delivered(self, now: float, samples: int, idle: int, log: Telemetry) -> None:
        """It has the batch, and ``idle`` workers have nothing to do: have more of them, or fewer, if that is due. To be
        called with the engine's lock held."""
        before, waited, self._waited_s = self._count.workers, self._waited_s, 0.0
        after = self._count.delivered(now, samples, waited, idle)
        if after != before:
            self._lane.resize(after)
            log.workers["at_work"] = after
