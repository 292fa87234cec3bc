"""Loaders' counters and gauges for Prometheus. They are read when it asks; nothing happens in between."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from minato_gpu.observe.counters import GAUGES, METRICS, Counts, Key, counters, found, summed
from minato_gpu.observe.shared_service import StatsProvider, StatsProviders

_QUANTILES = {"p50": "0.5", "p95": "0.95", "p99": "0.99"}


class LoaderCollector(Collector):
    """A collector of ``prometheus_client`` for all loaders of the process, each with its name as the label ``loader``.

    A counter that is computed from others may be lower in its last digit than at the look before, which Prometheus
    would take for a restart. So no counter is reported lower than before.
    """

    def __init__(self, providers: StatsProviders) -> None:
        self._providers = providers
        self._least: WeakKeyDictionary[StatsProvider, dict[Key, float]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Family]:
        """Returns the metrics that have values, for ``prometheus_client``."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
            name: (GaugeMetricFamily if name in GAUGES else CounterMetricFamily)(
                f"minato_{name}", metric.text, labels=["loader", *metric.labels]
            )
            for name, metric in METRICS.items()
        }
        for loader, provider in self._providers():
            snapshot = provider.snapshot()
            if snapshot is None:
                continue
            counts = self._rising(provider, summed(snapshot.ended, counters(snapshot.stats)))
            for (name, which), value in counts.items():
                families[name].add_metric([loader, which] if METRICS[name].labels else [loader], value)
            for name, gauge in GAUGES.items():
                for labels, value in found({**snapshot.stats, "epoch": snapshot.epoch}, gauge.path):
                    families[name].add_metric([loader, *(_QUANTILES.get(label, label) for label in labels)], value)
        return [family for family in families.values() if family.samples]

    def _rising(self, provider: StatsProvider, counts: Counts) -> Counts:
        with self._lock:
            least = self._least.setdefault(provider, {})
            least.update({key: max(value, least.get(key, 0.0)) for key, value in counts.items()})
            return dict(least)
