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
STORAGE = f"{NOT}verifiable here: the storage is what it is"
STEP = f"{NOT}verifiable here: the step is the model's"
GPUS = f"{NOT}verifiable here: needs as many GPUs"
MORE_CORES = f"{NOT}verifiable here: this machine has fewer cores"
POLICY = f"{NOT}verifiable here: the loader chooses its policy itself"
NO_CACHE = "none"
CACHE_POLICY = "cache policy, half of the set"
POLICIES = {
    "minio": "keeps what comes first, and lets nothing go",
    "next-use": "keeps what is needed soonest",
    "lru": "keeps what was used last (least recently used goes first)",
}
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


def points(profile: Profile) -> list[Point]:
    """Returns all questions that the profile can answer, each with what was measured among its points."""
    asked = (_workers, _cores, _cache, _rate, _latency, _step, _batch, _ranks, _loader)
    return [point for question in asked for point in question(profile)]


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
    """The rows of ``answer``, with what came of those that were tried: ``measured_s`` (seconds of an epoch, the middle
    of all times it was tried), ``spread_s`` between these times, ``deviation`` of what was predicted, as a share of it;
    ``verified`` says whether that lies in the interval, or why it was not tried."""
    trials = {trial.setting: trial for trial in tried}
    rows = answer(profile, draws=draws)
    for point, row in zip(points(profile), rows, strict=True):
        trial = trials.get(point.changes) if point.verifiable == HERE else None
        if trial is not None and trial.epoch_s:
            inside = row["low_s"] <= trial.median_s <= row["high_s"]
            row["verified"] = "run here, in its interval" if inside else "run here"
            row |= {"measured_s": trial.median_s, "spread_s": trial.spread_s}
            row["deviation"] = row["epoch_s"] / trial.median_s - 1
        elif trial is not None:
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


def _curve(
    question: str, values: Iterable[T], own: T, setting: Callable[[T], Setting], why_not: str = HERE
) -> Iterator[Point]:
    """A point for each value, in the order given. ``why_not``: those that were not measured cannot be run here."""
    for value in values:
        yield Point(question, value, setting(value), value == own, HERE if value == own else why_not)


def _workers(profile: Profile) -> Iterator[Point]:
    counts = {1, 2, 4, 8, 16, 32, profile.workers}
    some = [count for count in sorted(counts) if count <= max(16, 2 * profile.workers)]
    return _curve("workers", some, profile.workers, lambda count: Setting(workers=count))


def _cores(profile: Profile) -> Iterator[Point]:
    cores = max(1, int(profile.cores))
    counts = {max(1, cores // 2), cores, 2 * cores, 4 * cores}
    for count in sorted(counts):
        here = HERE if count <= cores else MORE_CORES
        more = max(1, count // cores)  # further cores are of use to workers that are there
        setting = Setting(cores=count, workers=more * profile.workers)
        yield Point("cores", count, setting, count == cores, here)


def _cache(profile: Profile) -> Iterator[Point]:
    if profile.storage is None:
        return
    ours = Setting(loader="minato_gpu")
    yield Point("cache of this loader, share of the set", NO_CACHE, ours, profile.loader == ours.loader)
    for share in (0.25, 0.5, 0.75, 1.0):
        yield Point("cache of this loader, share of the set", share, replace(ours, cache=_blocks(share)))
    for policy in POLICIES:
        setting = replace(ours, cache=0.5, policy=policy)
        yield Point(CACHE_POLICY, policy, setting, False, POLICY)


def _blocks(share: float) -> float:
    """Returns a cache's share with room for rounding: all of the set needs a little more than its bytes."""
    return share if share < 1 else 1.01


def _rate(profile: Profile) -> Iterator[Point]:
    storage = profile.storage
    if storage is not None:
        for times in _TIMES:
            rate = times * storage.bytes_per_s
            here = HERE if times == 1 else STORAGE
            yield Point("storage rate, MB/s", rate / 1e6, Setting(bytes_per_s=rate), times == 1, here)


def _latency(profile: Profile) -> Iterator[Point]:
    if profile.storage is not None:
        own = profile.storage.latency_s
        for latency in sorted({own, 1e-3, 5e-3, 20e-3, 50e-3, 100e-3}):
            here = HERE if latency == own else STORAGE
            yield Point("storage latency, ms", 1e3 * latency, Setting(latency_s=latency), latency == own, here)


def _step(profile: Profile) -> Iterator[Point]:
    return _curve("step, times", (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0), 1.0, lambda times: Setting(step_times=times), STEP)


def _batch(profile: Profile) -> Iterator[Point]:
    sizes = sorted({max(1, round(profile.batch_size * times)) for times in _TIMES})
    some = [size for size in sizes if size <= profile.samples]
    return _curve("batch size", some, profile.batch_size, lambda size: Setting(batch_size=size))


def _ranks(profile: Profile) -> Iterator[Point]:
    some = [ranks for ranks in sorted({1, 2, 4, 8, profile.ranks}) if ranks <= profile.samples]
    return _curve("ranks of this host", some, profile.ranks, lambda ranks: Setting(ranks=ranks), GPUS)


def _loader(profile: Profile) -> Iterator[Point]:
    kinds: tuple[LoaderKind, ...] = ("torch", "minato_gpu")
    return _curve("loader", kinds, profile.loader, lambda kind: Setting(loader=kind))


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
