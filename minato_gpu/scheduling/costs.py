"""Predicts costs per lane, in seconds of one slot, learned online from features and from earlier epochs.

For each lane, ``regression.LogLinear`` predicts a sample's log cost from its features (encoded bytes, header pixels),
and ``history.History`` keeps what the same key cost before. Both are combined by a learned factor: the share of last
epoch's deviation from the model that repeats (1: costs repeat exactly, 0: it was noise). That share is the slope of a
regression through the origin of this epoch's deviation on the recorded one, started at 0.8. Predictions are means,
because routing adds costs up: medians are corrected by the mean of exp(log error) (Duan's smearing estimate, JASA
1983).

A key is recorded once it deviates from the model by more than a tenth and by more than 50 microseconds, and always from
then on, so that cheap, uniform samples leave the history empty.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minato_gpu.samples import Key
from minato_gpu.scheduling.history import Array, History, Keys, plain
from minato_gpu.scheduling.regression import LogLinear

FLUSH = 128  # observations learned together
_MANY = 1024  # the same for a model that has seen at least twice as many
_YOUNG = 256  # a model that has seen fewer learns before a prediction once an eighth of those are pending
RECENT = 4096  # (predicted, actual) pairs kept for the report
_RECORD_LOG, _RECORD_S = 0.1, 50e-6  # least deviation of a recorded key
_SHORTEST_S = 1e-7
_WAIT_S = 0.1  # for the lock: a signal handler may have interrupted its owner


class _Errors:
    """Running mean of exp(log error) of one way of predicting."""

    def __init__(self) -> None:
        self._count = 0
        self.correction = 0.0  # added to a predicted log so that its exponential is right on average
        self._factor = 1.0

    def add(self, errors: Array) -> None:
        if not len(errors):
            return
        share = len(errors) / min(self._count + 16 + len(errors), 1000 + len(errors))
        factor = float(np.exp(np.clip(errors, -5, 5)).mean())
        self._factor += (factor - self._factor) * share
        self.correction = float(np.log(self._factor))
        self._count += len(errors)


class LaneModel:
    """Regression, history and pending observations of one lane."""

    def __init__(self, features: int, length: int | None) -> None:
        self.plain = LogLinear(0)
        self.model = LogLinear(features) if features else self.plain
        self.history = History(length)
        self.by_model, self.by_history = _Errors(), _Errors()
        self.pairs: list[tuple[float, float]] = []
        self._keys: list[Key] = []
        self._rows: list[Array] = []
        self._spent: list[float] = []
        self._repeated, self._deviations = 0.8, 1.0  # sums whose ratio is the share that repeats

    def push(self, keys: Keys, rows: Array | None, seconds: list[float]) -> None:
        """Adds observations; learns from them once enough are pending."""
        self._keys.extend(keys.tolist() if isinstance(keys, np.ndarray) else keys)
        if features := self.model.features:
            self._rows.append(np.full((len(seconds), features), np.nan) if rows is None else rows)
        self._spent.extend(seconds)
        if len(self._keys) >= (FLUSH if self.plain.count < 2 * _MANY else _MANY):
            self.flush()

    def refresh(self) -> None:
        """Learns from pending observations if the model is young and they are more than an eighth of what it has
        seen."""
        if self.plain.count < min(_YOUNG, 8 * len(self._keys)):
            self.flush()

    def predict(self, rows: Array, keys: Keys | None) -> tuple[Array, NDArray[np.bool_] | None]:
        """Returns log costs (medians), shape (n,), nan where nothing is known, and which of them use the key's history;
        None in place of these where none does."""
        base = self._base(rows)
        if keys is None or not self.history.recorded:
            return base, None
        past = self.history.read(keys)
        known = past == past
        if not np.logical_or.reduce(known):
            return base, None
        share = min(max(self._repeated / self._deviations, 0.0), 1.0)
        mixed = np.where(np.isnan(base), past, base + share * (past - base))
        return np.where(known, mixed, base), known

    def flush(self) -> None:
        """Takes in pending observations: evaluates the predictions, then learns, then records."""
        if not self._keys:
            return
        keys = plain(self._keys)
        rows = np.concatenate(self._rows) if self._rows else np.empty((len(keys), 0))
        logs = np.log(np.maximum(np.array(self._spent), _SHORTEST_S))
        self._keys, self._rows, self._spent = [], [], []
        self._evaluate(keys, rows, logs)
        given = _complete(rows)
        self.plain.learn(np.empty((len(logs), 0)), logs)
        if self.model is not self.plain and given.any():
            self.model.learn(rows[given], logs[given])
        self._record(keys, rows, logs)

    def _evaluate(self, keys: Keys, rows: Array, logs: Array) -> None:
        predicted, from_history = self.predict(rows, keys)
        known = np.zeros(len(rows), dtype=bool) if from_history is None else from_history
        usable = ~np.isnan(predicted)
        usable &= known | (_complete(rows) & (self.model.count > 0))  # others had only the lane's mean
        errors = logs - predicted
        correction = np.where(known, self.by_history.correction, self.by_model.correction)
        self.pairs.extend(zip((predicted + correction)[usable].tolist(), logs[usable].tolist(), strict=True))
        del self.pairs[:-RECENT]
        self.by_model.add(errors[usable & ~known])
        self.by_history.add(errors[usable & known])
        if known.any() and usable.any():
            past = self.history.read(_select(keys, np.flatnonzero(known)))
            base = self._base(rows[known])
            before, after = np.clip(past - base, -3, 3), np.clip(logs[known] - base, -3, 3)
            self._repeated += float(np.nansum(before * after))
            self._deviations += float(np.nansum(before * before))

    def _record(self, keys: Keys, rows: Array, logs: Array) -> None:
        base = self._base(rows)
        known = ~np.isnan(self.history.read(keys))
        surprising = (np.abs(logs - base) > _RECORD_LOG) & (np.abs(np.exp(logs) - np.exp(base)) > _RECORD_S)
        chosen = np.flatnonzero(known | surprising)
        if not isinstance(keys, np.ndarray):
            chosen = np.array([i for i in chosen.tolist() if keys[i] is not None], dtype=np.intp)
        if len(chosen):
            self.history.write(_select(keys, chosen), logs[chosen])

    def _base(self, rows: Array) -> Array:
        """Returns log costs by the models alone; nan where nothing is known."""
        learned = self.model is not self.plain and self.model.count > 0
        if learned and (total := np.add.reduce(rows, axis=None)) == total:  # none is nan
            return self.model.predict(rows)
        logs = np.full(len(rows), self.plain.level if self.plain.count else np.nan)
        if not learned:
            return logs
        given = _complete(rows)
        if given.any():
            logs[given] = self.model.predict(rows[given])
        return logs


def _complete(rows: Array) -> NDArray[np.bool_]:
    """Returns which rows have all features; every row if there are no features."""
    given: NDArray[np.bool_] = np.logical_not(np.isnan(rows).any(axis=1))
    return given


def _select(keys: Keys, at: NDArray[np.intp]) -> Keys:
    return keys[at] if isinstance(keys, np.ndarray) else [keys[i] for i in at.tolist()]


class CostModel:
    """Predicts costs online, as a function of the calls made so far. Every method may be called by any thread.

    Args:
        lanes: names of the lanes.
        features: how many positive numbers describe a sample; 0: none.
        length: number of indices, where keys are indices of a map-style data set (2 bytes per index and lane).
    """

    def __init__(self, lanes: Sequence[str] = ("cpu", "device"), features: int = 0, length: int | None = None) -> None:
        self.features = features
        self._lanes = {lane: LaneModel(features, length) for lane in lanes}
        self._lock = threading.Lock()  # a report learns, too

    def predict(self, lane: str, features: ArrayLike | None = None, keys: Keys | None = None) -> Array:
        """Returns mean seconds on one slot of ``lane``, shape (n,); nan where nothing is known yet.

        ``features``: shape (n, features), where a row with a nan counts as missing. ``keys``: n keys. With neither, one
        value: the lane's mean.
        """
        model = self._lanes[lane]
        count = len(keys) if keys is not None else 1 if features is None else len(np.asarray(features))
        with self._lock:
            model.refresh()
            logs, known = model.predict(self._matrix(features, count), keys)
            if known is None:
                return np.exp(logs + model.by_model.correction)
            return np.exp(logs + np.where(known, model.by_history.correction, model.by_model.correction))

    def observe_many(self, lane: str, keys: Keys | None, features: ArrayLike | None, seconds: ArrayLike) -> None:
        """Adds the measured seconds of samples on a slot of ``lane``: keys (n,) or None, features (n, features) or
        None, seconds (n,)."""
        spent = seconds if isinstance(seconds, list) else np.asarray(seconds, dtype=np.float64).tolist()
        matrix = None if features is None else self._matrix(features, len(spent))
        with self._lock:
            self._lanes[lane].push(keys if keys is not None else [None] * len(spent), matrix, spent)

    def report(self, lane: str | None = None, *, by_cost: bool = False) -> dict[str, int | float | None]:
        """Returns how good recent predictions were: ``samples``, ``log_sigma`` and ``rank_correlation``.

        They are taken over (predicted before learning, actual) pairs, at most the last 4,096 per lane. ``log_sigma``:
        standard deviation of log(actual / predicted). ``rank_correlation``: Spearman's. Both are None for fewer than
        two pairs, the latter also without spread. ``lane``: None for all lanes together. ``by_cost``: in ``log_sigma``
        each pair weighs as much as its seconds, for lanes that are parts of samples, many of which take next to
        nothing. If another thread learns for longer than 0.1 s, pending observations are left out.
        """
        models = [self._lanes[lane]] if lane is not None else list(self._lanes.values())
        if self._lock.acquire(timeout=_WAIT_S):
            try:
                for model in models:
                    model.flush()
            finally:
                self._lock.release()
        pairs = np.array([pair for model in models for pair in model.pairs.copy()], dtype=np.float64).reshape(-1, 2)
        if len(pairs) < 2:
            return {"samples": len(pairs), "log_sigma": None, "rank_correlation": None}
        errors, weights = pairs[:, 1] - pairs[:, 0], np.exp(pairs[:, 1]) if by_cost else np.ones(len(pairs))
        mean = np.average(errors, weights=weights)
        sigma = float(np.sqrt(np.average((errors - mean) ** 2, weights=weights)))
        return {"samples": len(pairs), "log_sigma": sigma, "rank_correlation": rank_correlation(*pairs.T)}

    def reset_report(self) -> None:
        """Begins a new report (for a new epoch); what was learned stays."""
        with self._lock:
            for model in self._lanes.values():
                model.flush()
                model.pairs.clear()

    @property
    def recorded(self) -> Mapping[str, int]:
        """Number of keys in each lane's history."""
        return {name: model.history.recorded for name, model in self._lanes.items()}

    def _matrix(self, features: ArrayLike | None, count: int) -> Array:
        if isinstance(features, np.ndarray) and features.shape == (count, self.features):
            return features
        if features is None or self.features == 0:
            return np.full((count, self.features), np.nan)
        return np.asarray(features, dtype=np.float64).reshape(count, self.features)


def rank_correlation(first: Array, second: Array) -> float | None:
    """Returns Spearman's rank correlation of two arrays of shape (n,); ties share their mean rank. None without
    spread."""
    ranks = [_ranks(first), _ranks(second)]
    spread = np.std(ranks[0]) * np.std(ranks[1])
    return float(np.cov(ranks[0], ranks[1], bias=True)[0, 1] / spread) if spread else None


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Array = ((ends - counts + ends - 1) / 2.0)[inverse]
    return ranks
