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
"""Predicted seconds of each sample on the CPU (nan: not known), the same on a device (None: no device lane), and each
sample's divided plans (None: no split points)."""


class Observed(NamedTuple):
    """Measured costs of one report's samples, an entry for each."""

    keys: list[Key]
    serials: list[TicketId]  # may be empty where no features are kept (``by_serial``)
    seconds: list[float]  # seconds of each sample, in a slot that has its core to itself
    took: float  # seconds that were spent on all of them, waits for a core included
    parts: list[Part | None] | None = None  # of samples with split points, where known (see ``TicketOutcome``)
    handed: list[int] | None = None  # bytes of each sample that another lane continues, else -1

    def without(self, left_out: Set[TicketId]) -> Observed:
        """Returns the costs of all samples but ``left_out``, without ``parts`` and ``handed``. Needs ``serials``."""
        at = [i for i, serial in enumerate(self.serials) if serial not in left_out]
        seconds = [self.seconds[i] for i in at]
        took = self.took - sum(self.seconds) + sum(seconds)
        return Observed([self.keys[i] for i in at], [self.serials[i] for i in at], seconds, took)


class Estimator:
    """Binds a ``CostModel`` to the lanes of one loader, for loaders without split points (else: ``CutEstimator``).

    ``lanes``: "cpu", and "device" where there is a device lane. ``of_keys`` predicts only once samples take over 100
    microseconds on average: cheaper ones are dispatched by the hundred, whatever they cost.
    """

    def __init__(self, model: CostModel, lanes: tuple[str, ...], micro_batches: MicroBatchCost | None = None) -> None:
        """``micro_batches`` estimates a micro-batch's fixed seconds on a device; None: costs are taken as measured."""
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
        """Returns each key's predicted seconds on a CPU slot that has its core to itself, before anything else is known
        of its sample: from what the key cost before where that is recorded, else the lane's mean.

        None while samples take under 100 microseconds on average or no key at all is recorded, and always with a
        device lane.
        """
        if self._mean < _COSTLY_S or len(self._lanes) > 1 or not self.model.recorded[self._lanes[0]]:
            return None
        costs = self.model.predict(self._lanes[0], keys=keys)
        return None if np.isnan(costs).any() else costs.tolist()

    def of_features(self, serials: list[TicketId], keys: list[Key], given: list[Features | None]) -> Predicted:
        """Returns each sample's predicted seconds of a slot, waits for a core included, on the CPU and on a device, and
        None for plans (see ``Predicted``).

        ``given``: each sample's cost features, or None. They are kept by serial until the sample is measured.
        """
        self._features.update((serial, values) for serial, values in zip(serials, given, strict=True) if values)
        out: list[list[float]] = []
        rows, known_keys = self._rows(given), plain(keys)
        for lane in self._lanes:
            costs = self.model.predict(lane, rows, known_keys)
            out.append((costs * self._slowdown[lane]).tolist())
        return out[0], out[1] if len(out) > 1 else None, None

    def _rows(self, given: Sequence[Features | None]) -> Array:
        """Returns cost features as an array, shape (n, features); a row of nan where they are not known."""
        unknown = (np.nan,) * self.model.features
        return np.array([values or unknown for values in given], dtype=np.float64)

    @property
    def by_serial(self) -> bool:
        """True while cost features of some sample are kept: then ``measured`` needs serials."""
        return bool(self._features)

    def took(self, samples: int, seconds: float) -> None:
        """Notes that ``samples`` samples took ``seconds`` in all, on any lane, without waits for a core if those are
        known."""
        self._samples += samples
        self._mean += (seconds / samples - self._mean) * max(samples / self._samples, samples / (samples + 200))

    def measured(self, lane: str, seen: Observed) -> None:
        """Learns what samples cost on a lane of kind ``lane``, "cpu" or "device"."""
        self._slowed(lane, seen)
        seen = self._as_in_full_micro_batch(lane, seen)
        features = [self._features.pop(serial, ()) for serial in seen.serials]
        given = self._rows(features) if features and all(features) else None
        keys, seconds = plain(seen.keys), seen.seconds
        if lane != self._lanes[0] and given is not None and len(seconds) > 1:
            seconds = self._as_predicted(lane, keys, given, seconds)
        self.model.observe_many(lane, keys, given, seconds)

    def _slowed(self, lane: str, seen: Observed) -> None:
        """Follows how many seconds a slot spends for each second that its samples cost, waits for a core included."""
        factor = min(seen.took / max(sum(seen.seconds), 1e-9), 10.0)
        self._slowdown[lane] += 0.02 * (factor - self._slowdown[lane])

    def _as_in_full_micro_batch(self, lane: str, seen: Observed) -> Observed:
        """Returns what a device's samples would have cost in a full micro-batch; those of the CPU unchanged."""
        if self._micro_batches is None or lane == self._lanes[0]:
            return seen
        total = max(sum(seen.seconds), 1e-9)
        share = self._micro_batches.of_samples(len(seen.seconds), total) / total
        parts = seen.parts and [part and (part[0], tuple(share * each for each in part[1])) for part in seen.parts]
        return seen._replace(seconds=[share * each for each in seen.seconds], parts=parts)

    def _as_predicted(self, name: str, keys: Keys, rows: Array, seconds: list[float]) -> list[float]:
        """Shares a micro-batch's seconds out to its samples as the model predicts, so that each sample's error is that
        of the whole; unchanged if a sample has no prediction."""
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
        """Returns how well costs were predicted since the epoch began: samples, sigma of the log error, and rank
        correlation with actual costs (see ``CostModel.report``). The last two may be None."""
        return dict(self.model.report())
