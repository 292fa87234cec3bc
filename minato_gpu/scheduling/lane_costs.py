"""What one lane's samples cost: the regression and the history joined, and how well that went.

The share of last epoch's deviation from the model that comes back is learned as the slope of a regression through
the origin (this epoch's deviation on the recorded one), started at 0.8.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from minato_gpu.scheduling.history import Array, History, Keys, plain
from minato_gpu.scheduling.regression import LogLinear

FLUSH = 128  # observations taken in together,
_MANY = 1024  # or, by a model that has seen twice as many, so many
_YOUNG = 256  # a model that has seen fewer takes them in before each prediction
RECENT = 4096  # (predicted, actual) pairs kept for the report
_RECORD_LOG, _RECORD_S = 0.1, 50e-6
_SHORTEST_S = 1e-7


class _Errors:
    """Running mean of the log error and of its exponential, for one way of predicting."""

    def __init__(self) -> None:
        self.count = 0
        self.variance = 0.25
        self.smear = 0.0  # what to add to a predicted log so that its exponential is right on average
        self._factor = 1.0

    def add(self, errors: Array) -> None:
        if not len(errors):
            return
        share = len(errors) / min(self.count + 16 + len(errors), 1000 + len(errors))
        factor = float(np.exp(np.clip(errors, -5, 5)).mean())
        self._factor += (factor - self._factor) * share
        self.smear = float(np.log(self._factor))
        self.variance += (float(np.minimum(errors**2, 9 * self.variance).mean()) - self.variance) * share
        self.count += len(errors)


class LaneCosts:
    """Model, history and observations not yet taken in of one lane."""

    def __init__(self, features: int, length: int | None) -> None:
        self.plain = LogLinear(0)
        self.model = LogLinear(features) if features else self.plain
        self.history = History(length)
        self.learned, self.recalled = _Errors(), _Errors()
        self.pairs: list[tuple[float, float]] = []
        self._features = features
        self._keys: list[Hashable] = []
        self._rows: list[Array] = []
        self._spent: list[float] = []
        self._kept, self._deviations = 0.8, 1.0  # sums whose ratio is the share that comes back

    def push(self, keys: Keys, rows: Array | None, seconds: list[float]) -> None:
        self._keys.extend(keys.tolist() if isinstance(keys, np.ndarray) else keys)
        if self._features:
            self._rows.append(np.full((len(seconds), self._features), np.nan) if rows is None else rows)
        self._spent.extend(seconds)
        if len(self._keys) >= (FLUSH if self.plain.count < 2 * _MANY else _MANY):
            self.flush()

    def refresh(self) -> None:
        """Take in what was observed, unless it is too little to matter."""
        if self.plain.count < _YOUNG:
            self.flush()

    def predict(self, rows: Array, keys: Keys | None) -> tuple[Array, NDArray[np.bool_]]:
        """Log costs (medians), and which of them rest on the key's history."""
        base = self._base(rows)
        if keys is None:
            return base, np.zeros(len(base), dtype=bool)
        past = self.history.read(keys)
        known = past == past
        share = min(max(self._kept / self._deviations, 0.0), 1.0)
        mixed = np.where(np.isnan(base), past, base + share * (past - base))
        return np.where(known, mixed, base), known

    def spread(self, rows: Array, keys: Keys | None) -> Array:
        base, known = self.predict(rows, keys)
        given = self._given(rows)
        sigma = np.full(len(rows), np.nan)
        if self.plain.count:
            sigma[:] = self.plain.sigma
        if given.any() and self.model.count:
            sigma[given] = self.model.spread(rows[given])
        sigma = np.where(known, np.sqrt(self.recalled.variance), sigma)
        return np.where(np.isnan(base), np.nan, sigma)

    def flush(self) -> None:
        """Take in what was observed: first judge the predictions, then learn, then record."""
        if not self._keys:
            return
        keys, self._keys = plain(self._keys), []
        rows = np.concatenate(self._rows) if self._features else np.empty((len(keys), 0))
        seconds = np.array(self._spent)
        self._rows, self._spent = [], []
        logs = np.log(np.maximum(seconds, _SHORTEST_S))
        self._judge(keys, rows, logs)
        given = self._given(rows)
        self.plain.learn(np.empty((len(logs), 0)), logs)
        if self.model is not self.plain and given.any():
            self.model.learn(rows[given], logs[given])
        self._record(keys, rows, logs)

    def _judge(self, keys: Keys, rows: Array, logs: Array) -> None:
        predicted, known = self.predict(rows, keys)
        usable = ~np.isnan(predicted)
        if self._features:  # of the others only the lane's mean was known: nothing had been predicted
            usable &= known | (self._given(rows) & (self.model.count > 0))
        errors = logs - predicted
        smear = np.where(known, self.recalled.smear, self.learned.smear)
        self.pairs.extend(zip((predicted + smear)[usable].tolist(), logs[usable].tolist(), strict=True))
        del self.pairs[:-RECENT]
        self.learned.add(errors[usable & ~known])
        self.recalled.add(errors[usable & known])
        if known.any() and usable.any():
            past = self.history.read(_chosen(keys, np.flatnonzero(known)))
            base = self._base(rows[known])
            before, after = np.clip(past - base, -3, 3), np.clip(logs[known] - base, -3, 3)
            self._kept += float(np.nansum(before * after))
            self._deviations += float(np.nansum(before * before))

    def _record(self, keys: Keys, rows: Array, logs: Array) -> None:
        base = self._base(rows)
        known = ~np.isnan(self.history.read(keys))
        surprising = (np.abs(logs - base) > _RECORD_LOG) & (np.abs(np.exp(logs) - np.exp(base)) > _RECORD_S)
        chosen = np.flatnonzero(known | surprising)
        if not isinstance(keys, np.ndarray):
            chosen = np.array([i for i in chosen.tolist() if keys[i] is not None], dtype=np.intp)
        if len(chosen):
            self.history.write(_chosen(keys, chosen), logs[chosen])

    def _base(self, rows: Array) -> Array:
        """Log costs by the models alone; nan where nothing is known."""
        logs = np.full(len(rows), self.plain.level if self.plain.count else np.nan)
        if not self._features:
            return logs
        given = self._given(rows)
        if self.model.count and given.any():
            logs[given] = self.model.predict(rows[given])
        return logs

    def _given(self, rows: Array) -> NDArray[np.bool_]:
        if not self._features:
            return np.zeros(len(rows), dtype=np.bool_)
        given: NDArray[np.bool_] = np.logical_not(np.isnan(rows).any(axis=1))
        return given


def _chosen(keys: Keys, at: NDArray[np.intp]) -> Keys:
    return keys[at] if isinstance(keys, np.ndarray) else [keys[i] for i in at.tolist()]
