"""Counters and gauges of a loader, and where in ``stats()`` each stands. Pure.

Counts of an epoch begin at zero with each epoch. Counts of a set of workers (reads, hits in a cache) go on as long as
these workers stay, and begin at zero with others: such a count has begun anew if it is lower at the beginning of an
epoch than at the end of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from numbers import Real
from typing import NamedTuple

from minato_gpu.samples import JSON, Value

Key = tuple[str, str]
"""A counter: its name, and which of several it is (a lane, a cause, a tier; "" where there is one)."""

Counts = Mapping[Key, float]


class Kind(Enum):
    """The way in which a metric counts: per epoch, per set of workers, or as a level."""

    OF_EPOCH = "counter of an epoch"
    OF_WORKERS = "counter of a set of workers"
    GAUGE = "gauge"


class Metric(NamedTuple):
    """A metric: its path in ``stats()``, and its description for Prometheus."""

    kind: Kind
    path: str  # in stats(), with a star for each label, and a bar between alternatives; "" where it is derived
    text: str  # its description
    labels: tuple[str, ...] = ()  # names of what the stars stand for


_EPOCH, _WORKERS, _GAUGE = Kind
METRICS = {
    "samples": Metric(_EPOCH, "samples_delivered", "Samples delivered to the training loop."),
    "batches": Metric(_EPOCH, "batches_delivered", "Batches delivered to the training loop."),
    "samples_failed": Metric(_EPOCH, "samples_failed", "Samples that failed, and were left out or raised."),
    "samples_skipped": Metric(_EPOCH, "samples_skipped", "Samples lost with a batch that raised."),
    "samples_padded": Metric(_EPOCH, "samples_padded", "Samples repeated so that every rank has its batches."),
    "samples_repeated": Metric(_EPOCH, "samples_repeated", "Samples prepared again after a worker died."),
    "epoch_seconds": Metric(_EPOCH, "elapsed_s", "Time that epochs have taken."),
    "wait_seconds": Metric(_EPOCH, "stalls/*/seconds", "Time that the training loop waited for a batch.", ("cause",)),
    "stalls": Metric(
        _EPOCH, "stalls/*/count", "Times that the training loop waited for a batch, by the main cause.", ("cause",)
    ),
    "workers": Metric(_EPOCH, "workers/*", "Workers that died, hung, or were replaced.", ("event",)),
    "lane_samples": Metric(_EPOCH, "lanes/*/samples", "Samples that a lane has prepared.", ("lane",)),
    "lane_handed_over": Metric(
        _EPOCH, "lanes/*/handed_over", "Samples that a lane has begun, and another went on with.", ("lane",)
    ),
    "lane_busy_seconds": Metric(_EPOCH, "", "Time that a lane's slots were at work, added up.", ("lane",)),
    "reads": Metric(_WORKERS, "reads/reads", "Reads from storage ahead of need."),
    "read_bytes": Metric(_WORKERS, "reads/bytes", "Bytes read from storage ahead of need."),
    "reads_failed": Metric(_WORKERS, "reads/failed", "Reads ahead of need that failed."),
    "reads_by_workers": Metric(_WORKERS, "reads/by_workers", "Reads that workers did themselves."),
    "cache_hits": Metric(_WORKERS, "cache/*/hits", "Reads that a cache has answered.", ("tier",)),
    "cache_misses": Metric(_WORKERS, "cache/*/misses", "Reads that a cache has not answered.", ("tier",)),
    "epoch": Metric(_GAUGE, "epoch", "Number of the current or last epoch, from 0."),
    "epoch_expected_samples": Metric(_GAUGE, "samples_expected", "Samples of that epoch, as the sampler tells."),
    "epoch_delivered_samples": Metric(_GAUGE, "samples_delivered", "Samples of that epoch that were delivered."),
    "in_flight_bytes": Metric(
        _GAUGE, "bytes_in_flight", "Bytes that are prepared or being prepared, and not delivered."
    ),
    "in_flight_peak_bytes": Metric(_GAUGE, "bytes_in_flight_peak", "The most of them at a time."),
    "lane_slots": Metric(_GAUGE, "lanes/*/slots", "Slots (workers, say) of a lane.", ("lane",)),
    "lane_service_seconds": Metric(
        _GAUGE, "lanes/*/service_s/*", "What recent samples took to be prepared.", ("lane", "quantile")
    ),
    "lane_queue_seconds": Metric(
        _GAUGE, "lanes/*/queue_s/*", "How long recent samples waited in a lane.", ("lane", "quantile")
    ),
    "cache_bytes": Metric(_GAUGE, "cache/*/bytes|nbytes", "Bytes of the copies in a tier of the cache.", ("tier",)),
}
"""All that is exported, in the order in which it is shown."""
COUNTERS = {name: metric for name, metric in METRICS.items() if metric.kind is not _GAUGE}
GAUGES = {name: metric for name, metric in METRICS.items() if metric.kind is _GAUGE}
OTHER = "other"
"""The cause of waits that ``stalls`` do not count: without workers all of them, as the training loop's own thread
prepares its batches."""


def counters(stats: Mapping[str, JSON]) -> dict[Key, float]:
    """Returns the counters of ``stats``, which ``DataLoader.stats`` has returned, by name and label."""
    counts = {
        (name, "".join(which)): float(value)
        for name, metric in COUNTERS.items()
        for which, value in found(stats, metric.path)
    }
    for lane, of in stats["lanes"].items():
        counts["lane_busy_seconds", lane] = of["busy_share"] * stats["elapsed_s"] * max(of["slots"], 1)
    known = sum(stall["seconds"] for stall in stats["stalls"].values())
    counts["wait_seconds", OTHER] = max(0.0, stats["wait_s"]["total"] - known)  # a stall is counted a moment before it
    return counts


def found(stats: Mapping[str, JSON], path: str) -> Iterator[tuple[tuple[str, ...], JSON]]:
    """Yields the values at a path of ``stats`` that are there and not None, each after the names that the path's stars
    stand for (see ``Metric.path``)."""
    first, _, rest = path.partition("/")
    for name in stats if first == "*" else first.split("|"):
        value, which = stats.get(name), (name,) if first == "*" else ()
        if rest and value is not None:
            yield from (((*which, *more), each) for more, each in found(value, rest))
        elif value is not None:
            yield which, value


def carried(before: Counts, ended: Counts, begun: Counts) -> dict[Key, float]:
    """Returns what is to be added to the counters of a new epoch, so that they never fall. Counters of workers that
    stay go on by themselves, so nothing is added to them.

    ``begun`` are the new epoch's counters at its beginning, ``ended`` those of the epoch before it at its end, to which
    ``before`` was to be added.
    """
    sums = dict(before)
    for key, last in ended.items():
        if COUNTERS[key[0]].kind is _EPOCH or begun.get(key, 0.0) < last:
            sums[key] = sums.get(key, 0.0) + last
    return sums


def summed(before: Counts, now: Counts) -> dict[Key, float]:
    """Returns the sums of two sets of counters; one that is missing in a set counts as 0."""
    return {key: before.get(key, 0.0) + now.get(key, 0.0) for key in {**before, **now}}


# --- flat numbers for TensorBoard, Weights & Biases and others --------------------------------------------------------

_NO_FIGURES = frozenset({"failures", "longest_waits"})
"""Reports about single samples: their positions are no figures of the run."""


def scalars(stats: Mapping[str, JSON]) -> dict[str, float]:
    """Returns every finite number of ``stats`` under its path, such as ``lanes/cpu/busy_share``.

    True is 1.0. The places of a list (several devices) are parts of the path, from 0. Text, None, NaN, infinity and
    what is about single samples (``failures``, ``longest_waits``) are left out.
    """
    return dict(_flat((name, value) for name, value in stats.items() if name not in _NO_FIGURES))


def _flat(items: Iterator[tuple[str, Value]]) -> Iterator[tuple[str, float]]:
    for name, value in items:
        if isinstance(value, Mapping):
            yield from _flat((f"{name}/{key}", inner) for key, inner in value.items())
        elif isinstance(value, (list, tuple)):
            yield from _flat((f"{name}/{place}", inner) for place, inner in enumerate(value))
        elif isinstance(value, Real) and math.isfinite(value):
            yield name, float(value)
