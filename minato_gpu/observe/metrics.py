"""Loaders' counters and gauges as Prometheus has them. Read when they are asked for; nothing happens between."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from minato_gpu.observe.counting import COUNTERS, Counts, Key, Metric, counters, found, summed
from minato_gpu.observe.shared_service import Teller, Tellers

_GAUGES = {
    "epoch": Metric("epoch", "Number of the current or last epoch, from 0."),
    "epoch_expected_samples": Metric("samples_expected", "Samples of that epoch, as the sampler tells."),
    "epoch_delivered_samples": Metric("samples_delivered", "Samples of that epoch that were delivered."),
    "in_flight_bytes": Metric("bytes_in_flight", "Bytes that are prepared or being prepared, and not delivered."),
    "in_flight_peak_bytes": Metric("bytes_in_flight_peak", "The most of them at a time."),
    "lane_slots": Metric("lanes/*/slots", "Slots (workers, say) of a lane.", ("lane",)),
    "lane_service_seconds": Metric(
        "lanes/*/service_s/*", "What recent samples took to be prepared.", ("lane", "quantile")
    ),
    "lane_queue_seconds": Metric(
        "lanes/*/queue_s/*", "How long recent samples waited in a lane.", ("lane", "quantile")
    ),
    "cache_bytes": Metric("cache/*/bytes|nbytes", "Bytes of the copies in a tier of the cache.", ("tier",)),
}
_QUANTILES = {"p50": "0.5", "p95": "0.95", "p99": "0.99"}


class LoaderCollector(Collector):
    """What is told of each loader, with its name as label ``loader``.

    A counter that is derived from others may lose its last digit between two looks, which Prometheus would take for a
    new beginning: what was told before is the least that is told.
    """

    def __init__(self, tellers: Tellers) -> None:
        self._tellers = tellers
        self._least: WeakKeyDictionary[Teller, dict[Key, float]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Family]:
        """See Collector."""
        counting = {
            name: CounterMetricFamily(f"minato_{name}", metric.text, labels=["loader", *metric.labels])
            for name, metric in COUNTERS.items()
        }
        gauging = {
            name: GaugeMetricFamily(f"minato_{name}", metric.text, labels=["loader", *metric.labels])
            for name, metric in _GAUGES.items()
        }
        for loader, teller in self._tellers():
            told = teller.told()
            if told is None:
                continue
            for (name, which), value in self._rising(teller, summed(told.ended, counters(told.stats))).items():
                counting[name].add_metric([loader, which] if COUNTERS[name].labels else [loader], value)
            for name, gauge in _GAUGES.items():
                for labels, value in found({**told.stats, "epoch": told.epoch}, gauge.path):
                    gauging[name].add_metric([loader, *(_QUANTILES.get(label, label) for label in labels)], value)
        return [family for family in (*counting.values(), *gauging.values()) if family.samples]

    def _rising(self, teller: Teller, counts: Counts) -> Counts:
        with self._lock:
            least = self._least.setdefault(teller, {})
            least.update({key: max(value, least.get(key, 0.0)) for key, value in counts.items()})
            return dict(least)
