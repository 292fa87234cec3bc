"""Counters of a loader's whole life, from those of its epochs: pure, and only ever rising.

What an epoch counts begins anew with the next. What a set of workers counts (reads, hits in a cache) goes on as long as
they stay, and begins anew with others: such a counter that stands lower at the beginning of an epoch than at the end of
the one before has begun anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minato_gpu.samples import JSON

Key = tuple[str, str]
"""A counter: its name, and which of several it is (a lane, a cause, a tier; "" where there is one)."""

Counts = Mapping[Key, float]

_OF_EPOCH = {
    "samples": "samples_delivered",
    "batches": "batches_delivered",
    "samples_failed": "samples_failed",
    "samples_skipped": "samples_skipped",
    "samples_padded": "samples_padded",
    "samples_repeated": "samples_repeated",
    "epoch_seconds": "elapsed_s",
}
_OF_READS = {"reads": "reads", "read_bytes": "bytes", "reads_failed": "failed", "reads_by_workers": "by_workers"}
_OF_TIER = {"cache_hits": "hits", "cache_misses": "misses"}
_OF_WORKERS = frozenset({*_OF_READS, *_OF_TIER})
OTHER = "other"
"""What the training loop waited for beside the stalls that have a cause: without workers, its own work."""


def counters(stats: Mapping[str, JSON]) -> dict[Key, float]:
    """What ``stats`` count, as they stand."""
    return {key: float(value) for key, value in _found(stats)}


def carried(before: Counts, ended: Counts, begun: Counts) -> dict[Key, float]:
    """What is to be added to the counters of the epoch that has begun, and stands at ``begun``.

    ``ended``: of the epoch before it, to which ``before`` was to be added.
    """
    sums = dict(before)
    for key, last in ended.items():
        if key[0] not in _OF_WORKERS or begun.get(key, 0.0) < last:
            sums[key] = sums.get(key, 0.0) + last
    return sums


def summed(before: Counts, now: Counts) -> dict[Key, float]:
    """Both, added up."""
    return {key: before.get(key, 0.0) + now.get(key, 0.0) for key in {**before, **now}}


def _found(stats: Mapping[str, JSON]) -> Iterator[tuple[Key, float]]:
    for name, known in _OF_EPOCH.items():
        yield (name, ""), stats[known]
    yield from _waits(stats)
    for how in ("died", "hung", "replaced"):
        yield ("workers", how), stats["workers"][how]
    for lane, of_lane in stats["lanes"].items():
        yield ("lane_samples", lane), of_lane["samples"]
        yield ("lane_handed_over", lane), of_lane["handed_over"]
        yield ("lane_busy_seconds", lane), of_lane["busy_share"] * stats["elapsed_s"] * max(of_lane["slots"], 1)
    for name, known in _OF_READS.items() if "reads" in stats else ():
        yield (name, ""), stats["reads"].get(known, 0)
    for tier, of_tier in stats.get("cache", {}).items():
        for name, known in _OF_TIER.items():
            yield (name, tier), of_tier.get(known, 0)


def _waits(stats: Mapping[str, JSON]) -> Iterator[tuple[Key, float]]:
    """A stall is counted a moment before the whole wait that it is part of."""
    known = 0.0
    for cause, stall in stats["stalls"].items():
        known += stall["seconds"]
        yield ("wait_seconds", cause), stall["seconds"]
        yield ("stalls", cause), stall["count"]
    yield ("wait_seconds", OTHER), max(0.0, stats["wait_s"]["total"] - known)
