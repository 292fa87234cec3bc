"""Ranks of one host under a virtual clock: how its cores are shared out, decided by the package's own ``shares``.

Every rank prepares batches of its own with workers that the kernel gives equal parts of the cores; a step begins when
every rank has its next batch, as with DistributedDataParallel.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import Literal

from minato_gpu.engine.host_share import PERIOD_S
from minato_gpu.scheduling.host_shares import Need, shares

BATCH, SLOW_SHARE, SLOW_FACTOR, BUSY = 16, 0.05, 40.0, 0.95
MEAN_S = 30e-3  # of a sample
Policy = Literal["fixed", "twice", "host"]
"""A worker for each of a rank's cores; twice as many; or as many of those as the rank's share is."""


def costs(count: int, mean_s: float, rng: random.Random) -> list[float]:
    """Seconds of ``count`` samples: one in twenty is forty times slower."""
    usual = mean_s / (1 + SLOW_SHARE * (SLOW_FACTOR - 1))
    return [usual * (SLOW_FACTOR if rng.random() < SLOW_SHARE else 1.0) for _ in range(count)]


@dataclass
class _Rank:
    costs: list[float]
    most: int
    at_work: int
    begun: int = 0
    running: int = 0
    done: int = 0


class Host:
    """One run. ``skew``: the first rank's samples cost so many times what the others' do. ``ahead``: batches that a
    rank may have ready or begun beyond the next."""

    def __init__(self, policy: Policy, ranks: int, cores: int, skew: float, ahead: int, steps: int, seed: int) -> None:
        rng, share = random.Random(seed), cores // ranks
        most = share if policy == "fixed" else 2 * share
        means = [MEAN_S * (skew if rank == 0 else 1.0) for rank in range(ranks)]
        self._policy, self._cores, self._ahead, self._steps = policy, cores, ahead, steps
        self._ranks = [_Rank(costs(steps * BATCH, mean, rng), most, most) for mean in means]
        self._work = sum(sum(rank.costs) for rank in self._ranks) / cores
        self._step = self._work / BUSY / steps
        self._missing = [[BATCH] * steps for _ in range(ranks)]
        self._running: list[tuple[float, int, int]] = []  # when it ends, in seconds that each worker has had
        self._had = 0.0
        self._taken = 0

    def of_bound(self) -> float:
        """The least time that steps and work allow, as a share of the time that the run takes."""
        now, step_end, look = 0.0, 0.0, 0.0
        while self._taken < self._steps:
            if now >= look and self._policy == "host":
                self._share_out()
                look = now + PERIOD_S
            self._begin()
            if now >= step_end and all(missing[self._taken] == 0 for missing in self._missing):
                self._taken, step_end = self._taken + 1, now + self._step
                continue
            rate = min(1.0, self._cores / len(self._running)) if self._running else 1.0
            times = [time for time in (step_end, look) if time > now]
            if self._running:
                times.append(now + (self._running[0][0] - self._had) / rate)
            then = min(times)
            self._had += (then - now) * rate
            now = then
            self._end()
        return max(self._steps * self._step, self._work) / step_end

    def _share_out(self) -> None:
        needs = [Need((rank.done - self._taken * BATCH) / BATCH, rank.most) for rank in self._ranks]
        for rank, workers in zip(self._ranks, shares(needs, self._cores), strict=True):
            rank.at_work = workers

    def _begin(self) -> None:
        limit = min(self._steps, self._taken + 1 + self._ahead) * BATCH
        for number, rank in enumerate(self._ranks):
            while rank.running < rank.at_work and rank.begun < limit:
                heapq.heappush(self._running, (self._had + rank.costs[rank.begun], number, rank.begun))
                rank.begun, rank.running = rank.begun + 1, rank.running + 1

    def _end(self) -> None:
        while self._running and self._running[0][0] <= self._had + 1e-12:
            _, number, sample = heapq.heappop(self._running)
            rank = self._ranks[number]
            rank.running, rank.done = rank.running - 1, rank.done + 1
            self._missing[number][sample // BATCH] -= 1
