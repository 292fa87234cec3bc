"""Loaders' counters and gauges as Prometheus has them. Read when they are asked for; nothing happens between."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from minato_gpu.observe.counting import COUNTERS, GAUGES, Counts, Key, counters, found, summed
from minato_gpu.observe.shared_service import Teller, Tellers

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
            for name, metric in GAUGES.items()
        }
        for loader, teller in self._tellers():
            told = teller.told()
            if told is None:
                continue
            for (name, which), value in self._rising(teller, summed(told.ended, counters(told.stats))).items():
                counting[name].add_metric([loader, which] if COUNTERS[name].labels else [loader], value)
            for name, gauge in GAUGES.items():
                for labels, value in found({**told.stats, "epoch": told.epoch}, gauge.path):
                    gauging[name].add_metric([loader, *(_QUANTILES.get(label, label) for label in labels)], value)
        return [family for family in (*counting.values(), *gauging.values()) if family.samples]

    def _rising(self, teller: Teller, counts: Counts) -> Counts:
        with self._lock:
            least = self._least.setdefault(teller, {})
            least.update({key: max(value, least.get(key, 0.0)) for key, value in counts.items()})
            return dict(least)
