"""Predictions of an epoch's time in another setting: the measured costs, through the scheduler of production.

Costs of samples and steps are drawn anew from those that were measured (the bootstrap; Efron, "Bootstrap methods",
Annals of Statistics 1979), with fixed seeds: the same question has the same answer, and how the answers of the draws
differ is the interval. What the machine adds is measured too: what a slot takes for a sample beyond its preparation
(``Profile.scaling``), what the step computes, when the first worker is ready. A slot takes what the simulation needs to
have the rates that were measured: what is lost because batches are delivered in order is no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from minato_gpu.lab.analysis.preparation import Law, fit
from minato_gpu.lab.analysis.profile import Profile, Setting
from minato_gpu.lab.analysis.virtual_epochs import DrawnCosts, SimulatedRank
from minato_gpu.util.cached_property import cached_property

DRAWS = 8
AS_MEASURED = Setting()
_STEADY = 4  # epochs at the end, caches being full


@dataclass(frozen=True)
class Prediction:
    """The predicted time of an epoch."""

    epoch_s: float  # of an epoch once caches are full and costs are known
    low_s: float  # with ``high_s``: the interval that holds nine of ten draws
    high_s: float
    first_epoch_s: float


class Predictor:
    """Answers for one profile: what is found out of the measured setting is found out once. Raises ValueError for a
    profile that knows of no sample or no step."""

    def __init__(self, profile: Profile) -> None:
        if not profile.suffices:
            raise ValueError("the profile has no sample, or no step: there is nothing to predict from")
        self.profile = profile

    def predict(self, setting: Setting = AS_MEASURED, *, draws: int = DRAWS) -> Prediction:
        """Predicts the measured rank's epoch in this setting. Raises ValueError where the profile does not know what
        the setting asks for."""
        profile = setting.applied(self.profile)
        cache = setting.cache
        if cache is not None and (profile.storage is None or profile.loader == "torch"):
            raise ValueError("a cache in memory is this loader's, of bytes that were seen to be read")
        epochs = 1 + _STEADY
        run = SimulatedRank(profile, cache, self.start_s)
        slot_s = self._slot_s(run)
        found = [run.simulated(self._draw(run, slot_s, epochs, seed), seed) for seed in range(draws)]
        steady = np.array([float(each.seconds[-_STEADY:].mean()) for each in found])
        low, high = np.quantile(steady, [0.05, 0.95]).tolist()
        epoch_s = float(np.median(steady))
        first = float(np.median([each.seconds[0] for each in found]))
        return Prediction(epoch_s, low, high, first)

    # --- what was measured -------------------------------------------------------------------------------------

    @cached_property
    def law(self) -> Law:
        """The law of a slot's seconds by number of workers, its core being its own."""
        profile, alone = self.profile, SimulatedRank(self.profile).cores
        if not profile.scaling:
            return Law(float(np.mean(profile.prepare_s)) / alone.stretch(profile.workers))
        workers = [alone.at_once(count) for count, _ in profile.scaling]
        return fit(workers, [self._measured_slot_s(count, rate) for count, rate in profile.scaling])

    def _measured_slot_s(self, workers: int, rate: float) -> float:
        """Seconds of a slot, its core being its own, where so many workers had this rate while nothing else was waited
        for: at most what they had for each sample, less what the simulation loses because batches come in order."""
        # the rate was taken over a long run: one epoch after the other
        warm = replace(self.profile, storage=None, workers=workers, overlap=True, persistent=True, shards=1)
        run = SimulatedRank(warm, steps=False)
        slot_s = workers / rate / run.cores.stretch(workers)
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
        return self.law.slot_s(run.cores.at_once(max(1, run.profile.workers)))

    def _draw(self, run: SimulatedRank, slot_s: float, epochs: int, seed: int) -> DrawnCosts:
        rng, measured = np.random.default_rng(seed), np.array(self.profile.prepare_s)
        prepare = measured[_drawn(rng, len(measured), run.samples)]
        steps = np.array(run.profile.step_s)
        each = rng.choice(rng.choice(steps, len(steps)), (epochs, run.batches))
        return DrawnCosts(prepare * (slot_s / float(measured.mean())), each)


def _drawn(rng: np.random.Generator, measured: int, count: int) -> NDArray[np.int64]:
    """Which of the measured samples stand for those of an epoch: each for itself where all were measured; else drawn
    from such as might have been."""
    if measured == count:
        return np.arange(count)
    if measured > count:
        return rng.permutation(measured)[:count]
    return rng.choice(rng.integers(0, measured, measured), count)
