"""What a loader has done between two answers, as figures to be shown: pure.

A wait, or a lease of a worker, is counted when it is over: shares are of what ended meanwhile, and never above 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from minato_gpu.observe.asking import LoaderState
from minato_gpu.observe.counting import counters
from minato_gpu.samples import JSON


@dataclass(frozen=True)
class LaneFigures:
    """``busy_share`` of its ``slots``; service times in seconds, of recent samples."""

    lane: str
    slots: int
    samples_per_s: float
    busy_share: float
    service_p50_s: float
    service_p99_s: float


@dataclass(frozen=True)
class LoaderFigures:
    """``wait_share``: of the time, which the training loop waited; ``stall_shares``: for what, the longest first;
    ``hit_shares``: of each tier of the cache. None: nobody knows, or nothing was asked for."""

    name: str
    epoch: int
    delivered: int
    expected: int | None
    samples_per_s: float
    wait_share: float
    stall_shares: Mapping[str, float]
    lanes: list[LaneFigures]
    failed: int
    in_flight_bytes: int
    in_flight_peak_bytes: int
    reads_per_s: float | None = None
    read_bytes_per_s: float | None = None
    hit_shares: Mapping[str, float | None] = field(default_factory=dict)


def figures(before: LoaderState | None, now: LoaderState) -> LoaderFigures:
    """Rates since ``before``; since the epoch began where there is none, or it was of another epoch."""
    change = _Change(before, now)
    stats = now.stats
    causes = {cause: change.share(("wait_seconds", cause)) for cause in stats["stalls"]}
    reads, tiers = stats.get("reads"), stats.get("cache", {})
    return LoaderFigures(
        name=now.name,
        epoch=now.epoch,
        delivered=stats["samples_delivered"],
        expected=stats["samples_expected"],
        samples_per_s=change.rate(("samples", "")),
        wait_share=min(1.0, sum(change.rate(key) for key in change.now if key[0] == "wait_seconds")),
        stall_shares=dict(sorted(causes.items(), key=lambda item: -item[1])),
        lanes=[_lane(name, lane, change) for name, lane in stats["lanes"].items()],
        failed=stats["samples_failed"] + stats["samples_skipped"],
        in_flight_bytes=stats["bytes_in_flight"],
        in_flight_peak_bytes=stats["bytes_in_flight_peak"],
        reads_per_s=None if reads is None else change.rate(("reads", "")),
        read_bytes_per_s=None if reads is None else change.rate(("read_bytes", "")),
        hit_shares={tier: change.hit_share(tier) for tier in tiers},
    )


def _lane(name: str, lane: Mapping[str, JSON], change: _Change) -> LaneFigures:
    slots = max(lane["slots"], 1)
    return LaneFigures(
        lane=name,
        slots=lane["slots"],
        samples_per_s=change.rate(("lane_samples", name)),
        busy_share=min(1.0, change.rate(("lane_busy_seconds", name)) / slots),
        service_p50_s=lane["service_s"]["p50"],
        service_p99_s=lane["service_s"]["p99"],
    )


class _Change:
    """Between two answers."""

    def __init__(self, before: LoaderState | None, now: LoaderState) -> None:
        self.now = counters(now.stats)
        known = before is not None and (before.name, before.epoch) == (now.name, now.epoch)
        self._before = counters(before.stats) if before is not None and known else {}
        since = now.at_s - before.at_s if before is not None and known else now.stats["elapsed_s"]
        self._seconds = max(since, 1e-9)

    def rate(self, key: tuple[str, str]) -> float:
        """By the second."""
        return self._grown(key) / self._seconds

    def share(self, key: tuple[str, str]) -> float:
        """Of the time, what a counter of seconds has grown by."""
        return min(1.0, self.rate(key))

    def hit_share(self, tier: str) -> float | None:
        """Of what was asked for meanwhile; where nothing was, of all that ever was."""
        hits, misses = ("cache_hits", tier), ("cache_misses", tier)
        for found in (self._grown, lambda key: self.now.get(key, 0.0)):
            if asked := found(hits) + found(misses):
                return found(hits) / asked
        return None

    def _grown(self, key: tuple[str, str]) -> float:
        return max(0.0, self.now.get(key, 0.0) - self._before.get(key, 0.0))
