"""Questions about a measured rank: how long an epoch would take with other workers, cache, storage or loader.

Each question is a curve of a few points, one of which is what was measured. A point says whether this machine could run
it: what cannot be verified here is labelled so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from minato_gpu.lab.analysis.predict import DRAWS, Prediction, Predictor
from minato_gpu.lab.analysis.profile import LoaderKind, Profile, Setting, Trial
from minato_gpu.samples import JSON

HERE = "can be run here"
NOT = "not "  # what a point begins with that was not, or cannot be, run
ELSEWHERE = f"{NOT}verifiable here"
T = TypeVar("T", bound=float | str)


@dataclass(frozen=True)
class Point:
    """One setting on the axis of a question."""

    question: str
    value: float | str  # on the question's axis
    setting: Setting  # the changes that it makes: none to what was measured
    measured: bool  # the setting is that of the profile
    runs_here: bool  # so that it can be verified


def answer(profile: Profile, tried: Iterable[Trial] = (), *, draws: int = DRAWS) -> list[dict[str, JSON]]:
    """Returns a row for each point, ready for ``console.show``.

    Each has ``question``, ``setting``, ``epoch_s`` with its interval from ``low_s`` to ``high_s``, ``first_epoch_s``,
    ``times_faster`` than the measured setting is predicted to be, ``measured`` ("here" marks that one) and
    ``verified``. Where settings were ``tried``, ``measured_s`` is the seconds of an epoch, and ``deviation`` that of
    what was predicted, as a share of it.
    """
    predictor = Predictor(profile)
    as_measured = predictor.predict(draws=draws)
    trials = {trial.setting: trial for trial in tried}
    rows = []
    for point in points(profile):
        found = as_measured if point.measured else predictor.predict(point.setting, draws=draws)
        row = {
            "question": point.question,
            "setting": point.value,
            "epoch_s": found.epoch_s,
            "low_s": found.low_s,
            "high_s": found.high_s,
            "first_epoch_s": found.first_epoch_s,
            "times_faster": as_measured.epoch_s / found.epoch_s,
            "measured": "here" if point.measured else None,
            "verified": HERE if point.runs_here else ELSEWHERE,
        }
        if trials and point.runs_here:
            row |= _verified(found, trials.get(point.setting))
        rows.append(row)
    return rows


def _verified(found: Prediction, trial: Trial | None) -> dict[str, JSON]:
    """Returns what came of a trial."""
    if trial is None or trial.epoch_s is None:
        return {"verified": f"{NOT}tried: {trial.why_not if trial else 'no time was left for it'}"}
    inside = found.low_s <= trial.epoch_s <= found.high_s
    return {
        "verified": "run here, in its interval" if inside else "run here",
        "measured_s": trial.epoch_s,
        "deviation": found.epoch_s / trial.epoch_s - 1,
    }


def points(profile: Profile) -> list[Point]:
    """Returns all questions that the profile can answer, each with what was measured among its points."""
    workers = sorted({1, 2, 4, 8, 16, 32, profile.workers})
    counts = [count for count in workers if count <= max(16, 2 * profile.workers)]
    kinds: tuple[LoaderKind, ...] = ("torch", "minato_gpu")
    return [
        *_curve("workers", counts, profile.workers, lambda count: Setting(workers=count), runs_here=True),
        *_stored(profile),
        *_curve("loader", kinds, profile.loader, lambda kind: Setting(loader=kind), runs_here=True),
    ]


def _curve(
    question: str, values: Iterable[T], own: T | None, setting: Callable[[T], Setting], *, runs_here: bool = False
) -> Iterator[Point]:
    """A point for each value, in the order given. ``runs_here``: others than the measured one can be verified."""
    for value in values:
        changes = Setting() if value == own else setting(value)
        yield Point(question, value, changes, value == own, value == own or runs_here)


def _stored(profile: Profile) -> Iterator[Point]:
    """What storage and a cache change, where reads were seen."""
    storage = profile.storage
    if storage is None:
        return
    own = 0.0 if profile.loader == "minato_gpu" else None
    yield from _curve("cache of this loader, share of the set", (0.0, 0.25, 0.5, 0.75, 1.0), own, _cached)
    rates = [times * storage.bytes_per_s / 1e6 for times in (0.5, 1.0, 2.0, 4.0)]
    yield from _curve("storage rate, MB/s", rates, rates[1], lambda rate: Setting(bytes_per_s=1e6 * rate))
    latency = 1e3 * storage.latency_s
    latencies = sorted({latency, 1.0, 5.0, 20.0, 50.0, 100.0})
    yield from _curve("storage latency, ms", latencies, latency, lambda each: Setting(latency_s=each / 1e3))


def _cached(share: float) -> Setting:
    """This loader with a cache of so much of the set; all of the set needs a little more than its bytes."""
    return Setting(loader="minato_gpu", cache=(share if share < 1 else 1.01) or None)
