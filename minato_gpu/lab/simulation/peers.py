"""How the peers' policies would do the same work: simulated at the same window and with the same lateness allowed.

Three policies, each as favourable to the peer as the comparison allows: no message costs, workers that persist over
epochs, devices used as further workers at their own cost, lateness bounded without a loss of throughput elsewhere.

- ``batch in order``: whole batches assigned round robin to the workers (PyTorch's default).
- ``batch out of order``: the same, delivered by completion within the lateness; a batch goes to the next worker in
  rotation that holds no more than its share (PyTorch with ``in_order=False``).
- ``sample by completion``: any free slot takes the next sample, batches form from what is ready (SPDL's pipeline).

None of them starts a new epoch before the last step of the old one has ended, as each iterator drains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

import numpy as np

from minato_gpu.lab.simulation.work import Integers, Outcome, Work

BATCH_IN_ORDER, BATCH_OUT_OF_ORDER, BY_COMPLETION = "batch in order", "batch out of order", "sample by completion"
PEERS = (BATCH_IN_ORDER, BATCH_OUT_OF_ORDER, BY_COMPLETION)
_MICRO_BATCH = 16  # samples that share what a device's run costs


def simulate_peer(policy: str, work: Work, window: int, lateness: int, period: float | Sequence[float]) -> Outcome:
    """Returns the outcome of a policy, one of ``PEERS``. ``window`` is in samples, ``lateness`` in batches;
    ``period``: see ``Work.steps``. Without slots and devices, the consumer prepares each batch when it asks."""
    steps = work.steps(period)
    if not work.slots + work.devices:  # the consumer prepares each batch itself
        seconds = np.add.reduceat(work.cpu, work.firsts[:-1])
        return Outcome(np.cumsum(seconds + steps) - steps, np.arange(len(work.cpu)))
    if policy == BY_COMPLETION:
        return _Samples(work, window, lateness, steps).run()
    strict = policy == BATCH_IN_ORDER
    return _Batches(work, window, 0 if strict else lateness, steps, strict).run()


@dataclass
class _PeerLoader:
    """The clock, the consumer and the end of epochs; subclasses decide what runs and what a batch is."""

    work: Work
    window: int
    lateness: int
    steps: Sequence[float]

    def __post_init__(self) -> None:
        self.delivered = 0
        self.consumer_ready = 0.0
        self.running: list[tuple[float, int, int]] = []  # (end, what, where)
        self.run_s = self.work.device_run_s / _MICRO_BATCH

    def run(self) -> Outcome:
        """Simulates until every batch is delivered."""
        times: list[float] = []
        batches: list[Integers] = []
        now = 0.0
        while self.delivered < self.work.batches:
            self.supply(now)
            if now >= self.consumer_ready and (batch := self.take()) is not None:
                times.append(now)
                batches.append(batch)
                self.consumer_ready = now + self.steps[self.delivered]
                self.delivered += 1
                continue
            events = [self.running[0][0]] if self.running else []
            now = min(events + [self.consumer_ready] * (self.consumer_ready > now))
            while self.running and self.running[0][0] <= now:
                self.ended(*heappop(self.running))
        return Outcome(np.array(times), np.concatenate(batches))

    def may_start(self, batch: int, now: float) -> bool:
        """Returns whether the epoch of the batch may begin: the step with the last batch of the one before is over."""
        start = self.work.begins[batch]
        return self.delivered > start or (self.delivered == start and (start == 0 or now >= self.consumer_ready))

    def supply(self, now: float) -> None:
        """Sends what the window allows to the workers."""
        raise NotImplementedError

    def ended(self, time: float, what: int, where: int) -> None:
        """Handles the end of a running piece of work."""
        raise NotImplementedError

    def take(self) -> Integers | None:
        """Returns the serials of the next batch, if it can be delivered."""
        raise NotImplementedError


@dataclass
class _Batches(_PeerLoader):
    """Whole batches on workers, each delivered when it comes; ``strict``: in rotation, as where they come in order."""

    strict: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        work = self.work
        self.ready = [*work.ready_times(), *[0.0] * work.devices]
        self.limit = max(1, self.window // work.batch)
        self.most = -(-self.limit // len(self.ready))
        self.held = [0] * len(self.ready)
        self.waiting: list[deque[int]] = [deque() for _ in self.ready]
        self.turn = self.sent = self.oldest = 0
        self.finished: dict[int, float] = {}
        self.seconds = [np.add.reduceat(work.cpu, work.firsts[:-1])]
        if work.device is not None:
            self.seconds.append(np.add.reduceat(work.device + self.run_s, work.firsts[:-1]))

    def supply(self, now: float) -> None:
        while self.sent < self.work.batches and self.sent - self.delivered < self.limit:
            if not self.may_start(self.sent, now):
                return
            while not self.strict and self.held[self.turn] >= self.most:
                self.turn = (self.turn + 1) % len(self.ready)
            worker, batch = self.turn, self.sent
            self.turn, self.sent = (worker + 1) % len(self.ready), batch + 1
            self.held[worker] += 1
            self.waiting[worker].append(batch)
            if self.held[worker] == 1:
                self.start(max(self.ready[worker], now), worker)

    def start(self, time: float, worker: int) -> None:
        """Begins the worker's next batch."""
        batch, device = self.waiting[worker].popleft(), worker >= self.work.slots
        heappush(self.running, (time + float(self.seconds[device][batch]), batch, worker))

    def ended(self, time: float, what: int, where: int) -> None:
        self.held[where] -= 1
        self.finished[what] = time
        if self.waiting[where]:
            self.start(time, where)

    def take(self) -> Integers | None:
        if not self.finished:
            return None
        if self.oldest <= self.delivered - self.lateness:
            batch = self.oldest
        else:
            batch = min(self.finished, key=lambda number: (self.finished[number], number))
        if self.finished.pop(batch, None) is None:
            return None
        if batch == self.oldest:
            under_way = [what for _, what, _ in self.running]
            self.oldest = min([self.sent, *self.finished, *under_way, *chain.from_iterable(self.waiting)])
        return np.arange(self.work.firsts[batch], self.work.firsts[batch + 1])


class _Samples(_PeerLoader):
    """Single samples, first come, first served; a batch is what is ready, by completion."""

    def __post_init__(self) -> None:
        super().__post_init__()
        work = self.work
        self.place = work.places(np.arange(len(work.cpu))).tolist()
        self.costs = [work.cpu.tolist()]
        if work.device is not None:
            self.costs.append((work.device + self.run_s).tolist())
        self.queue: deque[int] = deque()
        self.idle = [0, 0]
        for time in work.ready_times():
            heappush(self.running, (time, -1, 0))
        for _ in range(work.devices):
            heappush(self.running, (0.0, -1, 1))
        self.admitted = self.taken = self.oldest = 0
        self.ready: list[int] = []  # by completion
        self.is_ready = bytearray(len(work.cpu) + 1)

    def supply(self, now: float) -> None:
        while self.admitted < len(self.place) and self.admitted - self.taken < self.window:
            if not self.may_start(self.place[self.admitted], now):
                break
            self.queue.append(self.admitted)
            self.admitted += 1
        while self.queue and (self.idle[0] or self.idle[1]):
            kind = 1 if self.idle[1] else 0
            self.idle[kind] -= 1
            serial = self.queue.popleft()
            heappush(self.running, (now + self.costs[kind][serial], serial, kind))

    def ended(self, time: float, what: int, where: int) -> None:
        self.idle[where] += 1
        if what >= 0:
            self.ready.append(what)
            self.is_ready[what] = 1
            while self.is_ready[self.oldest]:
                self.oldest += 1

    def take(self) -> Integers | None:
        size = int(self.work.sizes[self.delivered])
        due = self.delivered - self.lateness
        if len(self.ready) < size or (self.oldest < len(self.place) and self.place[self.oldest] <= due):
            return None
        self.ready.sort(key=lambda serial: self.place[serial] > due)  # stable: what is due first, else by completion
        batch = sorted(self.ready[:size])
        del self.ready[:size]
        self.taken += size
        return np.array(batch)
