"""Storage under a virtual clock: so many reads at once, each of which waits for its latency, then for its turn."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

import numpy as np

from minato_gpu.engine.builder import READ_AHEAD
from minato_gpu.lab.analysis.profile import Storage
from minato_gpu.lab.simulation.intake import Arrival

_AT_ONCE = 64  # files that the reader process reads at once, where that pays
_TOLD_S = 1e-3  # what comes within this time is announced together
_NEVER = float("inf")


class VirtualStorage:
    """Brings the bytes of samples to a simulated loader (see ``simulation.intake.Reading``), in the order of need.

    ``hits``: shares of the samples, at random, that are in memory, in the first epoch and in those after it. ``batch``:
    samples of one.
    """

    def __init__(self, storage: Storage, hits: tuple[float, float], batch: int, seed: int) -> None:
        self.ahead = -(-READ_AHEAD // batch)
        self._storage, self._hits, self._hit_share = storage, hits, 0.0
        self._rng = np.random.default_rng((seed, 1))
        self._free_at = [0.0] * _AT_ONCE  # a heap: when each of the reads at once has ended
        self._link_free_at = 0.0  # when all bytes that were asked for have come
        self._arrivals: list[tuple[float, int]] = []  # a heap: when the bytes of a sample come, and its serial

    def begin(self, now: float, epoch: int) -> None:
        self._hit_share = self._hits[min(epoch, 1)]

    def want(self, now: float, place: int, serials: range) -> None:
        storage = self._storage
        for serial, chance in zip(serials, self._rng.random(len(serials)).tolist(), strict=True):
            at = now
            if chance >= self._hit_share:
                first_byte = max(now, self._free_at[0]) + storage.requests * storage.latency_s
                at = self._link_free_at = max(self._link_free_at, first_byte) + storage.nbytes / storage.bytes_per_s
                heapreplace(self._free_at, at)
            heappush(self._arrivals, (at, serial))

    def next_at(self) -> float:
        return self._arrivals[0][0] if self._arrivals else _NEVER

    def advance(self, until: float) -> Arrival | None:
        at = self.next_at()
        if at > until or at == _NEVER:
            return None
        told = []
        while self._arrivals and self._arrivals[0][0] <= at + _TOLD_S:
            last, serial = heappop(self._arrivals)
            told.append(serial)
        return Arrival(last, told)
