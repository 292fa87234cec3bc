"""Predicted costs for the engine: the cost model, fed with what lanes measure, asked by key or by features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import numpy as np

from minato_gpu.lanes.base import Part
from minato_gpu.lanes.contract import Offers
from minato_gpu.samples import JSON, Key, TicketId
from minato_gpu.scheduling.costs import CostModel
from minato_gpu.scheduling.history import Array, Keys, plain
from minato_gpu.scheduling.micro_batch_cost import MicroBatchCost
from minato_gpu.scheduling.plans import Plan
from minato_gpu.scheduling.spans import TicketSpan, tickets

_COSTLY_S = 100e-6

Features = tuple[float, ...]

Predicted = tuple[list[float], list[float] | None, Sequence[Sequence[Plan]] | None]
"""Predicted seconds of each sample on the CPU and on a device, and its plans between them if it has split points."""


class Observed(NamedTuple):
    """Measured costs of samples."""

    keys: list[Key]
    serials: list[TicketId]
    seconds: list[float]  # seconds of each sample, in a slot that has its core to itself
    took: float  # seconds that were spent on all of them
    parts: list[Part | None] | None = None  # parts of samples with split points, where they are known (see ``Report``)
    handed: list[int] | None = None  # bytes of those that go on elsewhere, -1 for the others

    def without(self, left_out: Set[TicketId]) -> Observed:
        """Returns the costs of the other samples, none of which is known by parts."""
        at = [i for i, serial in enumerate(self.serials) if serial not in left_out]
        seconds = [self.seconds[i] for i in at]
        took = self.took - sum(self.seconds) + sum(seconds)
        return Observed([self.keys[i] for i in at], [self.serials[i] for i in at], seconds, took)


class Estimator:
    """Binds a ``CostModel`` to the lanes of one loader, for pipelines without split points.

    (``CutEstimator`` is for those with.) Costs are predicted by key only once samples take over 100 microseconds:
    cheaper ones are dispatched by the hundred, whatever they cost.
    """

    def __init__(self, model: CostModel, lanes: tuple[str, ...], micro_batches: MicroBatchCost | None = None) -> None:
        """``micro_batches`` models what a device takes for each micro-batch, whatever is in it."""
        self.model = model
        self._micro_batches = micro_batches
        self._lanes = lanes
        self._features: dict[TicketId, Features] = {}
        self._slowdown = dict.fromkeys(lanes, 1.0)  # seconds of a slot for each second that a sample costs
        self._mean = 0.0  # seconds a sample takes, on any lane
        self._samples = 0  # samples that it is the mean of

    def begin_run(self) -> None:
        """Forgets tickets, as they are numbered anew."""
        self._features.clear()

    def begin_epoch(self) -> None:
        """Starts a new report of prediction errors."""
        self.model.reset_report()

    def offered(self, lane: str, offers: Offers | None) -> None:
        """Called when a device lane offers (or, with None, no longer offers) to continue split samples.

        Ignored here; see ``CutEstimator``.
        """

    def of_keys(self, keys: list[Key]) -> list[float] | None:
        """Returns predicted seconds per key on the CPU; None if nothing is known, or a device may prepare samples
        too."""
        if self._mean < _COSTLY_S or len(self._lanes) > 1 or not self.model.recorded[self._lanes[0]]:
            return None
        costs = self.model.predict(self._lanes[0], keys=keys)
        return None if np.isnan(costs).any() else costs.tolist()

    def of_features(self, serials: list[TicketId], keys: list[Key], given: list[Features | None]) -> Predicted:
        """Returns each sample's predicted seconds on each lane (nan: not known); no plans, as nothing is split here.

        ``given``: the samples' cost features, or None. They are kept by serial until the sample is measured.
        """
        self._features.update((serial, values) for serial, values in zip(serials, given, strict=True) if values)
        out: list[list[float]] = []
        rows, known_keys = self._rows(given), plain(keys)
        for lane in self._lanes:
            costs = self.model.predict(lane, rows, known_keys)
            out.append((costs * self._slowdown[lane]).tolist())
        return out[0], out[1] if len(out) > 1 else None, None

    def _rows(self, given: Sequence[Features | None]) -> Array:
        """Returns cost features as the model takes them; nan where none are known."""
        unknown = (np.nan,) * self.model.features
        return np.array([values or unknown for values in given], dtype=np.float64)

    @property
    def by_serial(self) -> bool:
        """True if cost features are kept by serial, until their samples are ``measured``."""
        return bool(self._features)

    def took(self, samples: int, seconds: float) -> None:
        """Notes that ``samples`` samples took ``seconds`` together, on any lane."""
        self._samples += samples
        self._mean += (seconds / samples - self._mean) * max(samples / self._samples, samples / (samples + 200))

    def measured(self, lane: str, seen: Observed) -> None:
        """Learns what samples cost on a lane of this kind."""
        self._slowed(lane, seen)
        seen = self._as_in_full_micro_batch(lane, seen)
        features = [self._features.pop(serial, ()) for serial in seen.serials]
        given = self._rows(features) if features and all(features) else None
        keys, seconds = plain(seen.keys), seen.seconds
        if lane != self._lanes[0] and given is not None and len(seconds) > 1:
            seconds = self._as_predicted(lane, keys, given, seconds)
        self.model.observe_many(lane, keys, given, seconds)

    def _slowed(self, lane: str, seen: Observed) -> None:
        """Learns how much longer samples took together than they cost alone."""
        factor = min(seen.took / max(sum(seen.seconds), 1e-9), 10.0)
        self._slowdown[lane] += 0.02 * (factor - self._slowdown[lane])

    def _as_in_full_micro_batch(self, lane: str, seen: Observed) -> Observed:
        """Returns what samples of a micro-batch would have cost in a full micro-batch."""
        if self._micro_batches is None or lane == self._lanes[0]:
            return seen
        total = max(sum(seen.seconds), 1e-9)
        share = self._micro_batches.of_samples(len(seen.seconds), total) / total
        parts = seen.parts and [part and (part[0], tuple(share * each for each in part[1])) for part in seen.parts]
        return seen._replace(seconds=[share * each for each in seen.seconds], parts=parts)

    def _as_predicted(self, name: str, keys: Keys, rows: Array, seconds: list[float]) -> list[float]:
        """Shares a micro-batch's time out to its samples as the model predicts, so that its error is that of the
        whole."""
        predicted = self.model.predict(name, rows, keys)
        total = float(np.add.reduce(predicted))
        if total != total:  # nothing is known of some
            return seconds
        shares: list[float] = (predicted * (sum(seconds) / total)).tolist()
        return shares

    def could_not_send(self, split: int, samples: int) -> None:
        """Called when so many samples could not be handed over before stage ``split``.

        Ignored here; see ``CutEstimator``.
        """

    def not_measured(self, spans: Iterable[TicketSpan]) -> None:
        """Drops the features kept for these tickets: they are prepared, and it is not known what each cost."""
        if self._features:
            for serial in tickets(spans):
                self._features.pop(serial, None)

    def report(self) -> dict[str, JSON]:
        """Returns how well costs are predicted: samples, sigma of the log error, and rank correlation with actual
        costs."""
        return dict(self.model.report())
