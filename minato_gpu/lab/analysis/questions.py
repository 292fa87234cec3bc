"""Questions about a measured rank: how long an epoch would take with another cache, storage, step, and so on.

Each question is a curve of a few points, one of which is what was measured. A point says whether this machine could run
it: what cannot be verified here is labelled so, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from minato_gpu.lab.analysis.predict import DRAWS, Prediction, Predictor
from minato_gpu.lab.analysis.profile import LoaderKind, Profile, Setting, Trial
from minato_gpu.samples import JSON

HERE = "can be run here"
NOT = "not "  # what a point begins with that was not, or cannot be, run
ELSEWHERE = f"{NOT}verifiable here"
T = TypeVar("T", bound=float | str)
_TIMES = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Point:
    """One setting on the axis of a question."""

    question: str
    value: float | str  # on the question's axis
    setting: Setting
    measured: bool = False  # the setting is that of the profile
    verifiable: str = HERE  # or why it is not

    @property
    def changes(self) -> Setting:
        """The changes that the setting makes; none if it is as it was measured."""
        return Setting() if self.measured else self.setting


def answer(profile: Profile, *, draws: int = DRAWS, chosen: Sequence[Point] | None = None) -> list[dict[str, JSON]]:
    """Returns a row for each point, ready for ``console.show``.

    Each has ``question``, ``setting``, ``epoch_s`` with its interval from ``low_s`` to ``high_s``, ``first_epoch_s``,
    ``times_faster`` than the measured setting is predicted to be, ``measured`` ("here" marks that one) and
    ``verified``.
    """
    predictor = Predictor(profile)
    as_measured = predictor.predict(draws=draws)
    return [
        _row(point, as_measured if point.measured else predictor.predict(point.setting, draws=draws), as_measured)
        for point in (points(profile) if chosen is None else chosen)
    ]


def compared(profile: Profile, tried: Iterable[Trial], *, draws: int = DRAWS) -> list[dict[str, JSON]]:
    """The rows of ``answer``, with what came of those that were tried: ``measured_s``, seconds of an epoch, and
    ``deviation`` of what was predicted, as a share of it; ``verified`` says whether that lies in the interval, or why
    it was not tried."""
    trials = {trial.setting: trial for trial in tried}
    rows = answer(profile, draws=draws)
    for point, row in zip(points(profile), rows, strict=True):
        if point.verifiable != HERE:
            continue
        trial = trials.get(point.changes, Trial(point.changes, why_not="no time was left for it"))
        if trial.epoch_s is not None:
            inside = row["low_s"] <= trial.epoch_s <= row["high_s"]
            row["verified"] = "run here, in its interval" if inside else "run here"
            row |= {"measured_s": trial.epoch_s, "deviation": row["epoch_s"] / trial.epoch_s - 1}
        else:
            row["verified"] = f"{NOT}tried: {trial.why_not}"
    return rows


def to_verify(profile: Profile) -> list[Point]:
    """The points that this machine can run."""
    return [point for point in points(profile) if point.verifiable == HERE]


def _row(point: Point, found: Prediction, as_measured: Prediction) -> dict[str, JSON]:
    return {
        "question": point.question,
        "setting": point.value,
        "epoch_s": found.epoch_s,
        "low_s": found.low_s,
        "high_s": found.high_s,
        "first_epoch_s": found.first_epoch_s,
        "times_faster": as_measured.epoch_s / found.epoch_s,
        "measured": "here" if point.measured else None,
        "verified": point.verifiable,
    }


# --- the questions ------------------------------------------------------------------------------------------------


def points(profile: Profile) -> list[Point]:
    """Returns all questions that the profile can answer, each with what was measured among its points."""
    workers = sorted({1, 2, 4, 8, 16, 32, profile.workers})
    sizes = sorted({max(1, round(profile.batch_size * times)) for times in _TIMES})
    kinds: tuple[LoaderKind, ...] = ("torch", "minato_gpu")
    return [
        *_curve(
            "workers",
            [count for count in workers if count <= max(16, 2 * profile.workers)],
            profile.workers,
            lambda count: Setting(workers=count),
            runs_here=True,
        ),
        *_cores(profile),
        *_stored(profile),
        *_curve("step, times", (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0), 1.0, lambda times: Setting(step_times=times)),
        *_curve(
            "batch size",
            [size for size in sizes if size <= profile.samples],
            profile.batch_size,
            lambda size: Setting(batch_size=size),
            runs_here=True,
        ),
        *_curve(
            "ranks of this host",
            [ranks for ranks in sorted({1, 2, 4, 8, profile.ranks}) if ranks <= profile.samples],
            profile.ranks,
            lambda ranks: Setting(ranks=ranks),
        ),
        *_curve("loader", kinds, profile.loader, lambda kind: Setting(loader=kind), runs_here=True),
    ]


def _curve(
    question: str, values: Iterable[T], own: T | None, setting: Callable[[T], Setting], *, runs_here: bool = False
) -> Iterator[Point]:
    """A point for each value, in the order given. ``runs_here``: others than the measured one can be verified."""
    for value in values:
        here = HERE if value == own or runs_here else ELSEWHERE
        yield Point(question, value, setting(value), value == own, here)


def _cores(profile: Profile) -> Iterator[Point]:
    """Further cores are of use to workers that are there, so that there are as many times as many of these."""
    own = max(1, int(profile.cores))
    counts = sorted({max(1, own // 2), own, 2 * own, 4 * own})
    return _curve(
        "cores",
        counts,
        own,
        lambda count: Setting(cores=count, workers=max(1, count // own) * profile.workers),
    )


def _stored(profile: Profile) -> Iterator[Point]:
    """What storage and a cache change, where reads were seen."""
    storage = profile.storage
    if storage is None:
        return
    own = 0.0 if profile.loader == "minato_gpu" else None
    yield from _curve("cache of this loader, share of the set", (0.0, 0.25, 0.5, 0.75, 1.0), own, _cached)
    for policy in ("minio", "next-use", "lru"):
        yield Point("cache policy, half of the set", policy, replace(_cached(0.5), policy=policy), False, ELSEWHERE)
    rates = [times * storage.bytes_per_s / 1e6 for times in _TIMES]
    yield from _curve("storage rate, MB/s", rates, rates[1], lambda rate: Setting(bytes_per_s=1e6 * rate))
    latency = 1e3 * storage.latency_s
    latencies = sorted({latency, 1.0, 5.0, 20.0, 50.0, 100.0})
    yield from _curve("storage latency, ms", latencies, latency, lambda each: Setting(latency_s=each / 1e3))


def _cached(share: float) -> Setting:
    """This loader with a cache of so much of the set; all of the set needs a little more than its bytes."""
    return Setting(loader="minato_gpu", cache=(share if share < 1 else 1.01) or None)


def parsed_range(text: str, *, whole: bool) -> tuple[float, ...]:
    """Values that somebody asks for: ``1-16``, ``1,2,4`` or ``8``. Of ``low-high`` whole numbers are doubled from the
    lower one, others go in six even steps. Raises ValueError for what is no such text."""
    try:
        if "-" in text:
            low, high = (float(part) for part in text.split("-"))
            if not 0 <= low <= high or (whole and low < 1):
                raise ValueError
            values = _doubled(int(low), int(high)) if whole else [low + (high - low) * at / 5 for at in range(6)]
        else:
            values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is no number, no list such as 1,2,4, and no range such as 1-16") from None
    if any(value < 0 or (whole and (value != int(value) or value < 1)) for value in values):
        raise ValueError(f"{text!r} has a value that makes no sense here")
    return tuple(values)


def _doubled(low: int, high: int) -> list[float]:
    values: list[float] = []
    while low < high:
        values.append(low)
        low *= 2
    return [*values, high]
