"""Predictions of an epoch's time in another setting, from measured costs.

An epoch takes as long as the longest of three: what it takes under a virtual clock, where cores and storage suffice;
all that it computes, by the cores; and all of its bytes, by what storage gives. Under the clock runs production's
scheduler, or PyTorch's batches in order, whose workers wait for storage themselves.

Costs of samples and steps are drawn anew from those that were measured (the bootstrap; Efron, "Bootstrap methods",
Annals of Statistics 1979), with fixed seeds: the same question has the same answer, and how the answers of the draws
differ is the interval. What the machine adds is measured too: what a slot takes for a sample beyond its preparation
(``Profile.scaling``), what the step computes, when the first worker is ready. A slot takes what the simulation needs to
have the rates that were measured: what is lost because batches are delivered in order is no part of it.

Each usual question is a curve of a few points, one of which is what was measured. A point says whether this machine
could run it: what cannot be verified here is labelled so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from minato_gpu.caching.choice import bound
from minato_gpu.lab.analysis.preparation import Law, fit
from minato_gpu.lab.analysis.profile import LoaderKind, Profile, Setting, Trial
from minato_gpu.lab.simulation.peers import BATCH_IN_ORDER, simulate_peer
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Array, Integers, Work
from minato_gpu.samples import JSON
from minato_gpu.scheduling.policy import Policy
from minato_gpu.util.cached_property import cached_property

DRAWS = 8
AS_MEASURED = Setting()
TRIP_S = 1e-4  # from a worker's last byte to the scheduler's answer: two wake-ups of a process
_STEADY = 4  # epochs at the end, caches being full
_MOST = 3000  # samples of an epoch that are simulated; what is longer goes on as it went
_AT_ONCE = 64  # reads that this loader's reader process has under way, where that pays


class DrawnCosts(NamedTuple):
    """Costs in seconds: of each sample of an epoch, on a slot with a core of its own, shape (samples,); and of each
    step of all epochs, shape (epochs, batches)."""

    prepare: Array
    steps: Array


class EpochTimes(NamedTuple):
    """What simulated epochs took."""

    seconds: Array  # of each epoch
    rate: float  # samples a second of the last epoch, or of all after the first if epochs overlap
    first_batch_s: float  # from the beginning, with workers ready


@dataclass(frozen=True)
class SimulatedRank:
    """A rank to be simulated."""

    profile: Profile
    cache: float | None = None  # share of the set's bytes that memory keeps
    start_s: float = 0.0  # until workers are ready, if they are started anew
    steps: bool = True  # whether there are training steps

    def stretch(self, workers: float) -> float:
        """Returns how many times as long a worker takes for a sample, because its core is another worker's at times:
        1.0 or more."""
        return max(1.0, workers * self.profile.prepare_cpu_share / self.profile.cores)

    @property
    def samples(self) -> int:
        """Number of samples of an epoch that are simulated: whole batches of it, where it is longer."""
        profile = self.profile
        if profile.samples <= _MOST:
            return profile.samples
        return profile.batch_size * max(_MOST // profile.batch_size, 2 * profile.workers * profile.prefetch)

    @property
    def batches(self) -> int:
        """Number of batches of an epoch that are simulated."""
        return -(-self.samples // self.profile.batch_size)

    def simulated(self, drawn: DrawnCosts, seed: int) -> EpochTimes:
        """Simulates as many epochs as there are rows of steps; if epochs overlap, one more follows the last of them."""
        profile, count = self.profile, len(drawn.steps)
        away = drawn.steps * self.steps + profile.loader_s + profile.transfer_s  # of the consumer, after each batch
        if profile.overlap:
            away = np.concatenate((away, away[-1:]))
        window = max(1, profile.prefetch) * profile.workers * profile.batch_size
        steps = away.ravel().tolist()
        read_s, first_read_s = np.zeros(count), 0.0
        if profile.loader == "torch" or not profile.workers:  # without workers, both do the same
            work = self._work(drawn, len(away), seed, self._blocked_s(drawn))
            outcome = simulate_peer(BATCH_IN_ORDER, work, window, 0, steps)
        else:
            read_s, first_read_s = self._read_s(count)
            work = self._work(drawn, len(away), seed, 0.0)
            policy = Policy(window, fixed=profile.in_order, max_lateness=profile.max_lateness)
            ahead = int(profile.overlap)
            outcome = VirtualLoader(work, policy, steps, ahead=ahead, trip_s=TRIP_S).run()
        times = outcome.times.reshape(away.shape)[:count]
        seconds = self._seconds(times, away[:count]) + first_read_s * (not profile.overlap)
        seconds = np.maximum(seconds, np.maximum(read_s, self._computed_s(drawn)))
        seconds[0] += self.start_s
        seconds[1:] += 0.0 if profile.persistent else self.start_s
        return EpochTimes(seconds, self._rate(times), outcome.first_batch_s + first_read_s)

    def _seconds(self, times: Array, away: Array) -> Array:
        """Returns the seconds of whole epochs, of which so many batches were handed over at these times."""
        ends = times[:, -1] + away[:, -1]
        begun = np.concatenate(([0.0], ends[:-1]))
        since = begun if self.profile.overlap else np.maximum(times[:, 0], begun)
        longer = max(0.0, self.profile.samples / self.samples - 1)
        seconds: Array = np.diff(ends, prepend=0.0) + longer * (ends - since)
        return seconds

    def _rate(self, times: Array) -> float:
        """Returns the samples a second between the first and the last batch of the last epoch.

        Of epochs that overlap, from the end of the first one on.
        """
        if self.profile.overlap and len(times) > 1:
            return self.samples * (len(times) - 1) / max(float(times[-1, -1] - times[0, -1]), 1e-9)
        after = max(self.samples - self.profile.batch_size, 1)
        return after / max(float(times[-1, -1] - times[-1, 0]), 1e-9)

    def _work(self, drawn: DrawnCosts, epochs: int, seed: int, blocked_s: float) -> Work:
        """Returns the workers' work, each epoch's samples shuffled; each blocks its worker for ``blocked_s`` more."""
        profile, rng = self.profile, np.random.default_rng(seed)
        keys = np.concatenate([rng.permutation(self.samples) for _ in range(epochs)])
        cpu = drawn.prepare[keys] + profile.collate_s / profile.batch_size
        computing = float(cpu.mean()) / (float(cpu.mean()) + blocked_s)
        cpu = (cpu + blocked_s) * self.stretch(profile.workers * computing)
        told = cpu.copy()
        told[: self.samples] = cpu.mean()  # nothing is known of a sample before it has been prepared once
        return Work(cpu, told, profile.batch_size, (self.samples,) * epochs, profile.workers)

    def _computed_s(self, drawn: DrawnCosts) -> float:
        """Returns how long all cores take for what an epoch computes: its preparation, its steps, the loader."""
        profile = self.profile
        prepared = float(drawn.prepare.mean()) * profile.samples + profile.collate_s * profile.batches
        step_s = profile.step_cpu_share * float(np.mean(profile.step_s)) * self.steps
        return (prepared * profile.prepare_cpu_share + (step_s + profile.loader_s) * profile.batches) / profile.cores

    def _read_s(self, epochs: int) -> tuple[Array, float]:
        """Returns how long storage takes for each epoch's bytes, and for the first of them."""
        storage, profile = self.profile.storage, self.profile
        if storage is None:
            return np.zeros(epochs), 0.0
        missed = np.full(epochs, 1.0 - (storage.cached_share or 0.0))
        if self.cache is not None:
            missed = np.full(epochs, 0.0 if self.cache >= 1 else 1.0 - bound(profile.shards, self.cache))
            missed[0] = 1.0
        each_s = replace(storage, concurrency=_AT_ONCE).seconds_per_sample()
        return missed * profile.samples * each_s, storage.requests * storage.latency_s * bool(missed[-1])

    def _blocked_s(self, drawn: DrawnCosts) -> float:
        """Returns how long a worker of PyTorch's waits for a sample's bytes, on average: for itself, or for all
        workers' where their requests together ask for more than the storage gives."""
        storage = self.profile.storage
        if storage is None:
            return 0.0
        missed = 1.0 - (storage.cached_share or 0.0)
        transfer = storage.nbytes / storage.bytes_per_s
        alone = storage.requests * storage.latency_s + transfer
        return max(missed * alone, missed * transfer * self.profile.workers - float(drawn.prepare.mean()))


@dataclass(frozen=True)
class Prediction:
    """The predicted time of an epoch."""

    epoch_s: float  # of an epoch once caches are full and costs are known
    low_s: float  # with ``high_s``: the interval that holds nine of ten draws
    high_s: float
    first_epoch_s: float


class Predictor:
    """Predicts epochs from one profile, which suffices (see ``Profile.suffices``)."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def predict(self, setting: Setting = AS_MEASURED, *, draws: int = DRAWS) -> Prediction:
        """Predicts the measured rank's epoch in this setting."""
        run = SimulatedRank(setting.applied(self.profile), setting.cache, self.start_s)
        slot_s = self._slot_s(run)
        found = [run.simulated(self._draw(run, slot_s, 1 + _STEADY, seed), seed) for seed in range(draws)]
        steady = np.array([float(each.seconds[-_STEADY:].mean()) for each in found])
        low, high = np.quantile(steady, [0.05, 0.95]).tolist()
        first = float(np.median([each.seconds[0] for each in found]))
        return Prediction(float(np.median(steady)), low, high, first)

    # --- what was measured -------------------------------------------------------------------------------------

    @cached_property
    def law(self) -> Law:
        """The law of a slot's seconds by number of workers, its core being its own."""
        profile, run = self.profile, SimulatedRank(self.profile)
        if not profile.scaling:
            return Law(float(np.mean(profile.prepare_s)) / run.stretch(profile.workers))
        workers = [min(count, profile.carried) for count, _ in profile.scaling]
        return fit(workers, [self._measured_slot_s(count, rate) for count, rate in profile.scaling])

    def _measured_slot_s(self, workers: int, rate: float) -> float:
        """Seconds of a slot, its core being its own, where so many workers had this rate while nothing else was waited
        for: at most what they had for each sample, less what the simulation loses because batches come in order."""
        # the rate was taken over a long run: one epoch after the other
        warm = replace(self.profile, storage=None, workers=workers, overlap=True, persistent=True, shards=1)
        run = SimulatedRank(warm, steps=False)
        slot_s = workers / rate / run.stretch(workers)
        draws = [self._draw(run, slot_s, 3, seed) for seed in range(3)]
        # the rate is that of mean samples, not of those that happen to be drawn
        even = [drawn._replace(prepare=drawn.prepare * (slot_s / drawn.prepare.mean())) for drawn in draws]
        simulated = [run.simulated(drawn, seed).rate for seed, drawn in enumerate(even)]
        return slot_s * float(np.clip(np.mean(simulated) / rate, 0.5, 2.0))

    @cached_property
    def start_s(self) -> float:
        """Seconds until workers are ready: until the first batch, less preparing and reading it."""
        profile = self.profile
        run = SimulatedRank(profile)
        first = [run.simulated(self._draw(run, self._slot_s(run), 1, seed), seed).first_batch_s for seed in range(3)]
        return max(0.0, profile.startup_s - float(np.mean(first)))

    # --- a setting ---------------------------------------------------------------------------------------------

    def _slot_s(self, run: SimulatedRank) -> float:
        """Seconds of a slot for a mean sample, its core being its own."""
        return self.law.slot_s(min(max(1, run.profile.workers), run.profile.carried))

    def _draw(self, run: SimulatedRank, slot_s: float, epochs: int, seed: int) -> DrawnCosts:
        rng, measured = np.random.default_rng(seed), np.array(self.profile.prepare_s)
        prepare = measured[_drawn(rng, len(measured), run.samples)]
        steps = np.array(run.profile.step_s)
        each = rng.choice(rng.choice(steps, len(steps)), (epochs, run.batches))
        return DrawnCosts(prepare * (slot_s / float(measured.mean())), each)


def _drawn(rng: np.random.Generator, measured: int, count: int) -> Integers:
    """Which of the measured samples stand for those of an epoch: each for itself where all were measured; else drawn
    from such as might have been."""
    if measured == count:
        return np.arange(count)
    if measured > count:
        return rng.permutation(measured)[:count]
    return rng.choice(rng.integers(0, measured, measured), count)


# --- the usual questions ---------------------------------------------------------------------------------------------


T = TypeVar("T", bound=float | str)


@dataclass(frozen=True)
class Point:
    """One setting on the axis of a question."""

    question: str
    value: float | str  # on the question's axis
    setting: Setting  # the changes that it makes: none to what was measured
    runs_here: bool  # so that it can be verified

    @property
    def measured(self) -> bool:
        """True if the setting is that of the profile."""
        return self.setting == AS_MEASURED


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
            "verified": "can be run here" if point.runs_here else "not verifiable here",
        }
        if trials and point.runs_here:
            row |= _verified(found, trials.get(point.setting))
        rows.append(row)
    return rows


def _verified(found: Prediction, trial: Trial | None) -> dict[str, JSON]:
    """Returns the entries of a point's row about its trial; None: it was not tried."""
    if trial is None or trial.epoch_s is None:
        return {"verified": f"not tried: {trial.why_not if trial else 'no time was left, or the script had ended'}"}
    inside = found.low_s <= trial.epoch_s <= found.high_s
    return {
        "verified": "run here, in its interval" if inside else "run here",
        "measured_s": trial.epoch_s,
        "deviation": found.epoch_s / trial.epoch_s - 1,
    }


def points(profile: Profile) -> list[Point]:
    """Returns the points of all questions that the profile can answer. What was measured is among each question's, but
    for this loader's cache if another loader was measured."""
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
    """Yields a point for each value, in the order given; ``own`` is the measured one (None: it is not among them).

    ``runs_here``: others than the measured one can be verified."""
    for value in values:
        changes = AS_MEASURED if value == own else setting(value)
        yield Point(question, value, changes, value == own or runs_here)


def _stored(profile: Profile) -> Iterator[Point]:
    """Yields the points about storage and a cache; none where no read was seen."""
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
