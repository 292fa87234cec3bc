"""What a loader has done between two answers, as figures to be shown: pure.

A wait, or a lease of a worker, is counted when it is over: shares are of what ended meanwhile, and never above 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from minato_gpu.lab.top.client import LoaderState
from minato_gpu.observe.counters import Counts, counters
from minato_gpu.samples import JSON


class LoaderFigures(NamedTuple):
    """Figures of a loader to be shown. None: nobody knows, or nothing was asked for. Times are of recent samples."""

    of_all: dict[str, JSON]  # of the whole loader, by name; "longest_wait": an entry of stats()["longest_waits"]
    stall_shares: dict[str, float]  # of the time, by cause of waiting, the longest first
    hit_shares: dict[str, float | None]  # by tier of the cache
    lanes: dict[str, dict[str, JSON]]  # figures of each lane

    def row(self) -> dict[str, JSON]:
        """Returns all of them under names of their own."""
        return {
            **self.of_all,
            **{f"stall_{cause}_share": share for cause, share in self.stall_shares.items()},
            **{f"cache_{tier}_hit_share": share for tier, share in self.hit_shares.items()},
            **{f"lane_{lane}_{name}": value for lane, of in self.lanes.items() for name, value in of.items()},
        }


def figures(before: LoaderState | None, now: LoaderState) -> LoaderFigures:
    """Returns rates since ``before``; since the epoch began if there is none, or it was of another epoch."""
    stats, counts = now.stats, counters(now.stats)
    rates = _rates(before, now, counts)
    causes = {cause: min(1.0, rates["wait_seconds", cause]) for cause in stats["stalls"]}
    of_all = {
        "loader": now.name,
        "epoch": now.epoch,
        "samples_delivered": stats["samples_delivered"],
        "samples_expected": stats["samples_expected"],
        "samples_per_s": rates["samples", ""],
        "wait_share": min(1.0, sum(rate for (name, _), rate in rates.items() if name == "wait_seconds")),
        "samples_failed": stats["samples_failed"] + stats["samples_skipped"],
        "in_flight_bytes": stats["bytes_in_flight"],
        "in_flight_peak_bytes": stats["bytes_in_flight_peak"],
        "longest_wait": next(iter(stats.get("longest_waits", ())), None),
        "reads_per_s": rates.get(("reads", "")),
        "read_bytes_per_s": rates.get(("read_bytes", "")),
        "copied_share": _copied_share(stats.get("share")),
    }
    return LoaderFigures(
        of_all,
        dict(sorted(causes.items(), key=lambda item: -item[1])),
        {tier: _hit_share(tier, rates, counts) for tier in stats.get("cache", {})},
        {name: _lane(name, lane, rates) for name, lane in stats["lanes"].items()},
    )


def _rates(before: LoaderState | None, now: LoaderState, counts: Counts) -> Counts:
    """Returns the growth of counters a second."""
    old: Counts = {}
    seconds = now.stats["elapsed_s"]
    if before is not None and (before.name, before.epoch) == (now.name, now.epoch):
        old, seconds = counters(before.stats), now.at_s - before.at_s
    return {key: max(0.0, count - old.get(key, 0.0)) / max(seconds, 1e-9) for key, count in counts.items()}


def _lane(name: str, lane: Mapping[str, JSON], rates: Counts) -> dict[str, JSON]:
    return {
        "slots": lane["slots"],
        "busy_share": min(1.0, rates["lane_busy_seconds", name] / max(lane["slots"], 1)),
        "samples_per_s": rates["lane_samples", name],
        "service_p50_s": lane["service_s"]["p50"],
        "service_p99_s": lane["service_s"]["p99"],
    }


def _copied_share(shared: Mapping[str, JSON] | None) -> float | None:
    """Returns the part of the samples that other loaders of the host prepared."""
    had = 0 if shared is None else shared["granted"] + shared["copied"] + shared["again"]
    return shared["copied"] / had if shared and had else None


def _hit_share(tier: str, *counted: Counts) -> float | None:
    """Returns the hit share of the first of these counts in which anything was asked for."""
    for each in counted:
        hits = each.get(("cache_hits", tier), 0.0)
        if asked := hits + each.get(("cache_misses", tier), 0.0):
            return hits / asked
    return None
