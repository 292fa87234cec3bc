"""Epochs of a measured rank under the virtual clock: drawn costs go in, seconds of each epoch come out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from minato_gpu.caching.choice import bound
from minato_gpu.lab.analysis.profile import Profile, Storage
from minato_gpu.lab.analysis.virtual_storage import VirtualStorage
from minato_gpu.lab.simulation.cores import ALONE, Cores
from minato_gpu.lab.simulation.peers import BATCH_IN_ORDER, simulate_peer
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Array, Outcome, Work
from minato_gpu.scheduling.policy import Policy

TRIP_S = 1e-4  # from a worker's last byte to the scheduler's answer: two wake-ups of a process
MOST = 3000  # samples of an epoch that are simulated; what is longer goes on as it went


class DrawnCosts(NamedTuple):
    """Costs in seconds: of each sample of an epoch, of one slot, and of every step of all epochs, shape (epochs,
    batches)."""

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

    @property
    def cores(self) -> Cores:
        """The cores that workers share with the consumer, which computes in part of its step, and while the loader's
        thread works."""
        profile = self.profile
        step_s = float(np.mean(profile.step_s)) if self.steps else 0.0
        away = step_s + profile.loader_s + profile.transfer_s
        computed = (profile.step_cpu_share * step_s + profile.loader_s) / away if away else 0.0
        return Cores(profile.cores, profile.prepare_cpu_share, computed)

    def _short(self, cores: Cores) -> Cores | None:
        """Returns the cores if there may be too few of them, else None."""
        return None if cores.pace(self.profile.workers, stepping=True) == ALONE else cores

    @property
    def samples(self) -> int:
        """Number of samples of an epoch that are simulated: whole batches of it, where it is longer."""
        profile = self.profile
        if profile.samples <= MOST:
            return profile.samples
        return profile.batch_size * max(MOST // profile.batch_size, 2 * profile.workers * profile.prefetch)

    @property
    def batches(self) -> int:
        """Number of batches of an epoch that are simulated."""
        return -(-self.samples // self.profile.batch_size)

    @property
    def _window(self) -> int:
        """Samples that are admitted and not delivered, at most."""
        return max(1, self.profile.prefetch) * self.profile.workers * self.profile.batch_size

    def simulated(self, drawn: DrawnCosts, seed: int) -> EpochTimes:
        """Simulates as many epochs as there are rows of steps; if epochs overlap, one more follows the last of them."""
        if self.profile.loader == "torch" or not self.profile.workers:  # without workers, both do the same
            return self._epochs(drawn, self._torch(drawn, seed))
        return self._epochs(drawn, self._ours(drawn, seed))

    def _away(self, drawn: DrawnCosts) -> Array:
        """Returns how long the consumer is away after each batch, by epochs."""
        profile = self.profile
        away = drawn.steps * self.steps + profile.loader_s + profile.transfer_s
        if profile.overlap:
            away = np.concatenate((away, away[-1:]))
        return away

    def _epochs(self, drawn: DrawnCosts, outcome: Outcome) -> EpochTimes:
        profile, away, count = self.profile, self._away(drawn), len(drawn.steps)
        times = outcome.times.reshape(away.shape)[:count]
        ends = times[:, -1] + away[:count, -1]
        seconds = np.diff(ends, prepend=0.0)
        longer = max(0.0, profile.samples / self.samples - 1)
        begun = np.concatenate(([0.0], ends[:-1]))
        since = begun if profile.overlap else np.maximum(times[:, 0], begun)
        seconds += longer * (ends - since)
        again = 0.0 if profile.persistent else self.start_s
        seconds += np.where(np.arange(count) == 0, self.start_s, again)
        return EpochTimes(seconds, self._rate(times), outcome.first_batch_s)

    def _rate(self, times: Array) -> float:
        """Returns the samples a second between the first and the last batch of the last epoch.

        Of epochs that overlap, from the end of the first one on.
        """
        if self.profile.overlap and len(times) > 1:
            return self.samples * (len(times) - 1) / max(float(times[-1, -1] - times[0, -1]), 1e-9)
        after = max(self.samples - self.profile.batch_size, 1)
        return after / max(float(times[-1, -1] - times[-1, 0]), 1e-9)

    def _work(self, drawn: DrawnCosts, seed: int) -> Work:
        """Returns the workers' work, the samples of each epoch shuffled."""
        profile, rng = self.profile, np.random.default_rng(seed)
        lengths = (self.samples,) * len(self._away(drawn))
        keys = np.concatenate([rng.permutation(self.samples) for _ in lengths])
        cpu = drawn.prepare[keys] + profile.collate_s / profile.batch_size
        told = cpu.copy()
        told[: self.samples] = cpu.mean()  # nothing is known of a sample before it has been prepared once
        return Work(cpu, told, profile.batch_size, lengths, profile.workers)

    def _ours(self, drawn: DrawnCosts, seed: int) -> Outcome:
        profile, storage = self.profile, self.profile.storage
        lateness = 0 if profile.in_order else profile.max_lateness
        reading = None if storage is None else VirtualStorage(storage, self._hits(storage), profile.batch_size, seed)
        return VirtualLoader(
            self._work(drawn, seed),
            Policy(self._window, fixed=profile.in_order, max_lateness=lateness),
            0.0,
            profile.overlap,
            TRIP_S,
            steps=self._away(drawn).ravel().tolist(),
            reading=reading,
            precise=True,
            cores=self._short(self.cores),
        ).run()

    def _hits(self, storage: Storage) -> tuple[float, float]:
        """Returns the share of the samples that are in memory in the first epoch, and after it."""
        if self.cache is None:
            cached = storage.cached_share or 0.0
            return cached, cached
        return 0.0, 1.0 if self.cache >= 1 else bound(self.profile.shards, self.cache)

    def _torch(self, drawn: DrawnCosts, seed: int) -> Outcome:
        """Simulates PyTorch's loader: workers take whole batches, and wait for storage themselves."""
        profile = self.profile
        work, cores = self._work(drawn, seed), self.cores
        if profile.storage is not None:
            prepare_s = float(work.cpu.mean())
            blocked = self._blocked_s(profile.storage, prepare_s)
            cores = replace(cores, computed=cores.computed * prepare_s / (prepare_s + blocked))
            work = Work(work.cpu + blocked, work.cpu, work.batch, work.epoch_samples, work.slots)
        steps = self._away(drawn).ravel().tolist()
        return simulate_peer(BATCH_IN_ORDER, work, self._window, 0, steps, self._short(cores))

    def _blocked_s(self, storage: Storage, prepare_s: float) -> float:
        """Returns how long a worker waits for a sample's bytes, on average: for itself, or for all workers' where their
        requests together ask for more than the storage gives."""
        missed = 1.0 - (storage.cached_share or 0.0)
        transfer = storage.nbytes / storage.bytes_per_s
        alone = storage.requests * storage.latency_s + transfer
        return max(missed * alone, missed * transfer * self.profile.workers - prepare_s)
