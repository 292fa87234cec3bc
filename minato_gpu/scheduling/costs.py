"""Predicted cost per lane: seconds of one slot, learned online from cheap features and from earlier epochs.

Per lane, ``regression.LogLinear`` predicts a sample's log cost from its features (encoded bytes, header pixels);
``history.History`` keeps what the same key cost before. What the two say is joined by a factor that is learned too:
the share of last epoch's deviation from the model that comes back (1: costs repeat exactly, 0: the deviation was
noise). Predictions are means, not medians: they are corrected by the mean of exp(log error) (Duan's smearing
estimate, JASA 1983), because routing adds costs up.

Rule of recording: a key is recorded once it deviates from the model by more than a tenth and by more than 50
microseconds, and always from then on. Trivial, uniform samples therefore leave the history untouched.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from minato_gpu.scheduling.history import Array, Keys
from minato_gpu.scheduling.lane_costs import LaneCosts

_WAIT_S = 0.1  # for who takes observations in: perhaps it is this very thread, in which a signal's handler asks


class CostModel:
    """Online cost predictions: a function of the calls made so far. Every method may be called by any thread.

    ``lanes``: names of the lanes; ``features``: how many positive numbers describe a sample (0: none);
    ``length``: number of indices where keys are indices of a map-style data set (2 bytes per index and lane).
    """

    def __init__(self, lanes: Sequence[str] = ("cpu", "device"), features: int = 0, length: int | None = None) -> None:
        self.features = features
        self._lanes = {lane: LaneCosts(features, length) for lane in lanes}
        self._lock = threading.Lock()  # whoever asks for a report takes in what was observed

    def predict(self, lane: str, features: ArrayLike | None = None, keys: Keys | None = None) -> Array:
        """Mean seconds on one slot of ``lane``, shape (n,); nan where nothing is known yet.

        ``features``: shape (n, features); a row with a nan counts as not given. ``keys``: n keys. With neither,
        one value: the lane's mean.
        """
        model = self._lanes[lane]
        count = len(keys) if keys is not None else 1 if features is None else len(np.asarray(features))
        with self._lock:
            model.refresh()
            logs, known = model.predict(self._matrix(features, count), keys)
            return np.exp(logs + np.where(known, model.recalled.smear, model.learned.smear))

    def uncertainty(self, lane: str, features: ArrayLike | None = None, keys: Keys | None = None) -> Array:
        """Standard deviation of the log of the actual cost around the predicted one, shape (n,); nan if unknown."""
        model = self._lanes[lane]
        count = len(keys) if keys is not None else 1 if features is None else len(np.asarray(features))
        with self._lock:
            model.refresh()
            return model.spread(self._matrix(features, count), keys)

    def observe(self, lane: str, key: Hashable, features: ArrayLike | None, seconds: float) -> None:
        """One sample with this key and these features, shape (features,), took ``seconds`` on a slot of ``lane``."""
        row = None if features is None else np.asarray(features, dtype=np.float64).reshape(1, self.features)
        with self._lock:
            self._lanes[lane].push([key], row, [seconds])

    def observe_many(self, lane: str, keys: Keys | None, features: ArrayLike | None, seconds: ArrayLike) -> None:
        """``observe`` for n samples: keys (n,) or None, features (n, features) or None, seconds (n,)."""
        spent = seconds if isinstance(seconds, list) else np.asarray(seconds, dtype=np.float64).tolist()
        matrix = None if features is None else self._matrix(features, len(spent))
        with self._lock:
            self._lanes[lane].push(keys if keys is not None else [None] * len(spent), matrix, spent)

    def report(self, lane: str | None = None, *, by_cost: bool = False) -> dict[str, int | float | None]:
        """How good the predictions were: ``samples``, ``log_sigma``, ``rank_correlation`` of the recent pairs.

        Each pair is (what the model said before it learned from the sample, what the sample took); at most the
        last 4,096 per lane. ``log_sigma``: standard deviation of log(actual / predicted). ``rank_correlation``:
        Spearman's. None where fewer than two pairs, or no spread, give a value. ``by_cost``: each pair counts for the
        deviation with the seconds that it took, where lanes are parts of samples: many take next to nothing. While
        another call is taking observations in, for long, it is that of those before them.
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
        """Start a new report (an epoch begins); what was learned stays."""
        with self._lock:
            for model in self._lanes.values():
                model.flush()
                model.pairs.clear()

    @property
    def recorded(self) -> Mapping[str, int]:
        """How many keys each lane's history holds."""
        return {name: model.history.recorded for name, model in self._lanes.items()}

    def _matrix(self, features: ArrayLike | None, count: int) -> Array:
        if features is None or self.features == 0:
            return np.full((count, self.features), np.nan)
        return np.asarray(features, dtype=np.float64).reshape(count, self.features)


def rank_correlation(first: Array, second: Array) -> float | None:
    """Spearman's rank correlation of two samples of shape (n,); ties share their mean rank. None without spread."""
    ranks = [_ranks(first), _ranks(second)]
    spread = np.std(ranks[0]) * np.std(ranks[1])
    if spread == 0:
        return None
    return float(((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())).mean() / spread)


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Array = ((ends - counts + ends - 1) / 2.0)[inverse]
    return ranks
