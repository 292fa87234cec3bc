"""Why preparation does not keep up with the step, and how samples a second grow with workers.

The growth is fitted to what was measured, never taken for a straight line, by the universal scalability law (Gunther,
"A Simple Capacity Model of Massively Parallel Transaction Systems", CMG 1993): with w workers, rate(w) = w / (cost (1 +
contention (w - 1) + crosstalk w (w - 1))). In w / rate(w), the seconds that a slot takes for a sample, it is linear,
and least squares with no negative part fit it. Beyond the cores that computing workers have, no further worker brings
anything: there the law is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from minato_gpu.lab.analysis.profile import Profile, mean
from minato_gpu.lab.console import number


@dataclass(frozen=True)
class Law:
    """How long a worker takes for a sample, by the number of workers (the universal scalability law)."""

    cost_s: float  # of a sample with one worker
    contention: float = 0.0  # share of it that is added for each further worker
    crosstalk: float = 0.0  # share of it that is added for each ordered pair of workers

    def slot_s(self, workers: float) -> float:
        """Returns the seconds that one of so many workers takes for a sample."""
        more = workers - 1.0
        return self.cost_s * (1.0 + self.contention * more + self.crosstalk * workers * more)

    def rate(self, workers: float) -> float:
        """Returns the samples a second of so many workers together."""
        return workers / self.slot_s(workers)


def fit(workers: Sequence[float], slot_s: Sequence[float]) -> Law:
    """Fits the law to the seconds that a worker took for a sample with so many workers; relative errors count.

    Two counts of workers show no crosstalk, one shows no contention.
    """
    count, seconds = np.array(workers, float), np.array(slot_s, float)
    columns = np.stack([np.ones_like(count), count - 1, count * (count - 1)], axis=1) / seconds[:, None]
    known = min(len({*workers}), 3)
    best, least = (float(seconds.mean()), 0.0, 0.0), float("inf")
    for chosen in _PARTS[known]:
        found = np.linalg.lstsq(columns[:, chosen], np.ones_like(seconds), rcond=None)[0]
        error = float(np.square(columns[:, chosen] @ found - 1).sum())
        if (found >= 0).all() and found[0] > 0 and error < least:
            parts = dict(zip(chosen, found.tolist(), strict=True))
            best, least = (parts[0], parts.get(1, 0.0), parts.get(2, 0.0)), error
    cost, contention, crosstalk = best
    return Law(cost, contention / cost, crosstalk / cost)


_PARTS = {1: ([0],), 2: ([0], [0, 1]), 3: ([0], [0, 1], [0, 2], [0, 1, 2])}
"""Which parts of the law may be, by how many counts of workers were tried: none of them is below zero."""


Case = Literal[
    "unknown",
    "noise",
    "step-bound",
    "slow rank",
    "transfer-bound",
    "loader-bound",
    "no workers",
    "too few workers",
    "too few cores",
    "few slow samples",
    "too few batches in flight",
    "collate-bound",
    "one lock",
    "slow storage",
    "storage latency",
]
_MOST_WORKERS = 256
_MUCH = 0.5  # of a worker's time for a batch
_FULL = 0.9  # of the workers that the cores carry
_FLAT = 1.3  # times one worker's rate, with at least twice the workers
_SLOW = 4.0  # times the middle sample
_ENOUGH = 1.05  # times the needed rate


class Advice(NamedTuple):
    """The change that helps against a preparation stall."""

    case: Case
    sentence: str
    most: float = 1.0  # share of the epoch that it can save at most


def advice(profile: Profile, step_s: float) -> Advice:
    """Returns what to change if the step takes ``step_s`` seconds of each batch."""
    batch_s = worker_seconds(profile)
    has, needed_rate = profile.workers, profile.batch_size / max(step_s, 1e-9)
    if has == 0:
        need = min(_workers_for(batch_s, step_s), max(int(profile.cores), 1))
        return Advice(
            "no workers",
            f"Samples are prepared by the training process itself, between steps: num_workers={need} prepares them "
            "meanwhile.",
        )
    if _is_flat(profile):
        return Advice(
            "one lock",
            f"{has} workers prepare no more than {_growth(profile):.1f} times what one does: they wait for one lock, "
            "as threads do for Python's: use processes (worker_kind='process'), or code that lets go of the lock.",
        )
    if _rate(profile, batch_s) >= _ENOUGH * needed_rate:
        return _uneven(profile, step_s)
    if profile.collate_s > _MUCH * batch_s:
        share = profile.collate_s / batch_s
        return Advice(
            "collate-bound",
            f"collate_fn takes {share:.0%} of a worker's time ({number(profile.collate_s * 1e3)} ms a batch), and "
            f"without it batches would come {1 / max(1 - share, 0.01):.1f} times as fast: "
            "let it copy whole arrays, or move its work into the samples.",
        )
    return _more_workers(profile, batch_s, step_s)


def worker_seconds(profile: Profile) -> float:
    """Returns the seconds of one worker for a batch."""
    return max(mean(profile.prepare_s) * profile.batch_size + profile.collate_s, 1e-9)


def _rate(profile: Profile, batch_s: float) -> float:
    """Returns the samples a second that the workers make on average, from the costs of all samples, slow ones too."""
    return min(profile.workers, profile.carried) * profile.batch_size / batch_s


def _workers_for(batch_s: float, step_s: float) -> int:
    return min(max(1, math.ceil(batch_s / max(step_s, 1e-9))), _MOST_WORKERS)


def _counted(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _more_workers(profile: Profile, batch_s: float, step_s: float) -> Advice:
    has, cores = profile.workers, profile.cores
    needed = profile.batch_size / max(step_s, 1e-9)
    need = by_cost = _workers_for(batch_s, step_s)
    if profile.scaling:
        law = fit([count for count, _ in profile.scaling], [count / rate for count, rate in profile.scaling])
        counts = range(1, min(4 * by_cost, _MOST_WORKERS + 1))
        need = next((count for count in counts if law.rate(count) >= needed), by_cost)
    need = max(need, has + 1)
    times = needed / _rate(profile, batch_s)
    if need <= profile.carried:
        return Advice(
            "too few workers",
            f"Preparation is too slow with {_counted(has)}: num_workers={need} keeps up with the step.",
        )
    if has >= _FULL * profile.carried:
        return Advice(
            "too few cores",
            f"To keep up, preparation needs {need} workers of the speed measured, and there are {cores} cores: prepare "
            f"less for each sample ({times:.1f} times less), keep what is prepared (cache=), or prepare on the GPU.",
        )
    more = max(has + 1, math.floor(profile.carried))
    return Advice(
        "too few workers",
        f"Preparation is too slow with {_counted(has)}: num_workers={more}, as many as {cores} cores carry, is up to "
        f"{more / has:.1f} times as fast, which does not keep up with the step yet: prepare less, or on the GPU too.",
        1 - has / more,
    )


def _uneven(profile: Profile, step_s: float) -> Advice:
    """Returns the advice for samples of unlike cost, where workers keep up on average."""
    middle = median(profile.prepare_s) if profile.prepare_s else 0.0
    # one that is over long before the step is holds up no batch
    slow = [each for each in profile.prepare_s if each > max(_SLOW * middle, step_s / 2)]
    if slow and middle:
        ahead = math.ceil(max(slow) / max(step_s, 1e-9) / profile.workers) + profile.prefetch
        return Advice(
            "few slow samples",
            f"One sample in {round(len(profile.prepare_s) / len(slow))} takes {mean(slow) / middle:.1f} times as long "
            "as the middle one, and its batch waits for it: minato_gpu.DataLoader(in_order=False) lets others go "
            f"first, or prefetch_factor={ahead} hides it.",
        )
    return Advice(
        "too few batches in flight",
        f"{_counted(profile.workers)} would do on average, but only so many batches are prepared ahead "
        f"({profile.prefetch} each): prefetch_factor={2 * max(profile.prefetch, 1)} evens it out.",
    )


def _growth(profile: Profile) -> float:
    """Returns the rate of the most workers that were tried, divided by that of the fewest."""
    return profile.scaling[-1][1] / profile.scaling[0][1]


def _is_flat(profile: Profile) -> bool:
    """Returns whether workers add little although there are cores for them.

    Processes that are busy have no lock in common: they lack cores, which others may have taken.
    """
    if not profile.scaling or (profile.worker_kind == "process" and profile.prepare_cpu_share > _MUCH):
        return False
    of_cores = min(profile.scaling[-1][0], profile.cores) / profile.scaling[0][0]
    return of_cores >= 2 and _growth(profile) < _FLAT
