"""Loaders' counters and gauges as Prometheus has them. Read when they are asked for; nothing happens between."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from minato_gpu.observe.counting import Counts, Key, counters, summed
from minato_gpu.observe.shared_service import Teller, Tellers, Told

_COUNTERS: dict[str, tuple[str, str]] = {
    "samples": ("", "Samples delivered to the training loop."),
    "batches": ("", "Batches delivered to the training loop."),
    "samples_failed": ("", "Samples that failed, and were left out or raised."),
    "samples_skipped": ("", "Samples lost with a batch that raised."),
    "samples_padded": ("", "Samples repeated so that every rank has its batches."),
    "samples_repeated": ("", "Samples prepared again after a worker died."),
    "epoch_seconds": ("", "Time that epochs have taken."),
    "wait_seconds": ("cause", "Time that the training loop waited for a batch."),
    "stalls": ("cause", "Times that the training loop waited for a batch."),
    "workers": ("event", "Workers that died, hung, or were replaced."),
    "lane_samples": ("lane", "Samples that a lane has prepared."),
    "lane_handed_over": ("lane", "Samples that a lane has begun, and another went on with."),
    "lane_busy_seconds": ("lane", "Time that a lane's slots were at work, added up."),
    "reads": ("", "Reads from storage ahead of need."),
    "read_bytes": ("", "Bytes read from storage ahead of need."),
    "reads_failed": ("", "Reads ahead of need that failed."),
    "reads_by_workers": ("", "Reads that workers did themselves."),
    "cache_hits": ("tier", "Reads that a cache has answered."),
    "cache_misses": ("tier", "Reads that a cache has not answered."),
}
_GAUGES: dict[str, tuple[tuple[str, ...], str]] = {
    "epoch": ((), "Number of the current or last epoch, from 0."),
    "epoch_expected_samples": ((), "Samples of that epoch, as the sampler tells."),
    "epoch_delivered_samples": ((), "Samples of that epoch that were delivered."),
    "in_flight_bytes": ((), "Bytes that are prepared or being prepared, and not delivered."),
    "in_flight_peak_bytes": ((), "The most of them at a time."),
    "lane_slots": (("lane",), "Slots (workers, say) of a lane."),
    "lane_service_seconds": (("lane", "quantile"), "What recent samples took to be prepared."),
    "lane_queue_seconds": (("lane", "quantile"), "How long recent samples waited in a lane."),
    "cache_bytes": (("tier",), "Bytes of the copies in a tier of the cache."),
}
_QUANTILES = {"p50": "0.5", "p95": "0.95", "p99": "0.99"}
_Gauge = tuple[str, tuple[str, ...], float]


class LoaderCollector(Collector):
    """What is told of each loader, with its name as label ``loader``.

    A counter that is derived from others may lose its last digit between two looks, which Prometheus would take for a
    new beginning: what was told before is the least that is told.
    """

    def __init__(self, tellers: Tellers) -> None:
        self._tellers = tellers
        self._least: WeakKeyDictionary[Teller, dict[Key, float]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        counting = {
            name: CounterMetricFamily(f"minato_{name}", text, labels=["loader", *([label] if label else [])])
            for name, (label, text) in _COUNTERS.items()
        }
        gauging = {
            name: GaugeMetricFamily(f"minato_{name}", text, labels=["loader", *labels])
            for name, (labels, text) in _GAUGES.items()
        }
        for loader, teller in self._tellers():
            told = teller.told()
            if told is None:
                continue
            for (name, which), value in self._rising(teller, summed(told.ended, counters(told.stats))).items():
                counting[name].add_metric([loader, which] if _COUNTERS[name][0] else [loader], value)
            for name, labels, value in _gauges(told):
                gauging[name].add_metric([loader, *labels], value)
        return [family for family in (*counting.values(), *gauging.values()) if family.samples]

    def _rising(self, teller: Teller, counts: Counts) -> Counts:
        with self._lock:
            least = self._least.setdefault(teller, {})
            least.update({key: max(value, least.get(key, 0.0)) for key, value in counts.items()})
            return dict(least)


def _gauges(told: Told) -> Iterator[_Gauge]:
    stats = told.stats
    yield "epoch", (), told.epoch
    if stats["samples_expected"] is not None:
        yield "epoch_expected_samples", (), stats["samples_expected"]
    yield "epoch_delivered_samples", (), stats["samples_delivered"]
    yield "in_flight_bytes", (), stats["bytes_in_flight"]
    yield "in_flight_peak_bytes", (), stats["bytes_in_flight_peak"]
    for lane, of_lane in stats["lanes"].items():
        yield "lane_slots", (lane,), of_lane["slots"]
        for known, quantile in _QUANTILES.items():
            yield "lane_service_seconds", (lane, quantile), of_lane["service_s"][known]
            yield "lane_queue_seconds", (lane, quantile), of_lane["queue_s"][known]
    for tier, of_tier in stats.get("cache", {}).items():
        nbytes = of_tier.get("bytes", of_tier.get("nbytes"))
        if nbytes is not None:
            yield "cache_bytes", (tier,), nbytes
