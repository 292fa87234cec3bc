"""The scheduler of production under a virtual clock: lanes with slots, true costs, a consumer with a period.

Everything that the shell does in production happens here to the same state machine: workers start one by one, take
chunks from their lane's queue in order, report what is done when a chunk ends or when the scheduler asks to look,
and give back what is revoked. Nothing is random: the work brings its own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from types import MappingProxyType

import numpy as np

from minato_gpu.lab.simulation.virtual_lane import ChunkRun, SampleProgress, VirtualLane
from minato_gpu.lab.simulation.work import LEARNED, Outcome, Work
from minato_gpu.samples import OutputBatch, SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler

SILENT_S = 1.0  # after which a machine counts as lost, as in lanes/far/lane.py
_NEVER = float("inf")


@dataclass
class FarNode:
    """A machine with ``slots`` workers for a loader. ``arrival(time, samples)``: when samples that were ready at that
    time have come from there; ``leaves_at``: when it is gone."""

    slots: int
    arrival: Callable[[float, int], float]
    leaves_at: float = _NEVER


class VirtualLoader:
    """One simulated run; ``run`` returns its outcome.

    ``period``: seconds that the consumer takes for a batch, or for each of them (see ``Work.steps``); 0: it asks again
    at once. ``ahead``: how many epochs after the present one may be admitted before it has ended, 0 or 1; None: any
    number. ``trip_s``: how long a report takes to the scheduler and its answer back. ``far``: lanes of
    other machines, by name.
    """

    def __init__(
        self,
        work: Work,
        policy: Policy,
        period: float | Sequence[float] = 0.0,
        *,
        ahead: int | None = None,
        trip_s: float = 0.0,
        far: Mapping[str, FarNode] = MappingProxyType({}),
    ) -> None:
        self.scheduler = Scheduler(policy)
        self._work, self._policy, self._ahead = work, policy, ahead
        self._steps = work.steps(period)
        self._trip_s = trip_s
        self._costs = [
            None if costs is None else costs.tolist() for costs in (work.predicted_cpu, work.predicted_device)
        ]
        self._admitted = 0  # batches
        self._samples = SampleProgress(work)
        self._far, self._away = far, {name: set[int]() for name in far}  # chunks that are there, or on their way
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._now = 0.0
        self._lanes: dict[str, VirtualLane] = {}
        self._lane(m.CPU)
        self._composed: dict[OutputBatch, m.Compose] = {}
        self._delivered: list[tuple[float, m.Compose]] = []
        self._consumer_ready = 0.0
        self._asked = False
        self._step_s = 0.0  # of the consumer's last step
        self._device_s = 0.0  # device work that the next step will feel
        self.made_on: dict[int, str] = {}  # which device prepared a sample, by serial; the others are the CPU's

    def _lane(self, name: str) -> VirtualLane:
        if name not in self._lanes:
            self._lanes[name] = VirtualLane(name, self._work, self._samples, self._ends)
        return self._lanes[name]

    def run(self) -> Outcome:
        """Simulates until every batch is delivered."""
        return run_together([self])[0]

    def _open(self) -> None:
        for number in range(self._work.devices):
            self._push(0.0, partial(self._opens, f"device:{number}"))
        for time in self._work.ready_times():
            self._push(time, partial(self._opens, m.CPU))
        for name, node in self._far.items():
            for _ in range(node.slots):
                self._push(0.0, partial(self._opens, name))
            if node.leaves_at < _NEVER:
                self._push(node.leaves_at, partial(self._leaves, name))
                self._push(node.leaves_at + SILENT_S, partial(self._lose, name))

    def _is_done(self) -> bool:
        """Does all that can be done now; returns whether every batch has been delivered."""
        self._admit()
        self._consume()
        return len(self._delivered) == self._work.batches

    def _next_at(self) -> float:
        """Returns when something happens next."""
        wake, first = self.scheduler.wake_at(), self._events[0][0] if self._events else _NEVER
        return first if wake is None else min(first, wake)

    # --- time -----------------------------------------------------------------------------------------------

    def _push(self, time: float, happens: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._events, (time, self._number, happens))

    def _step(self) -> None:
        """Does what happens next."""
        wake, first = self.scheduler.wake_at(), self._events[0][0] if self._events else _NEVER
        if wake is not None and wake < first:
            self._look(max(wake, self._now))
            return
        if not self._events:
            raise RuntimeError(f"deadlock at {self._now} after {len(self._delivered)} batches")
        self._now, _, happens = heappop(self._events)
        happens()

    def _opens(self, name: str) -> None:
        lane = self._lane(name)
        self._tell(m.LaneOpened(self._now, name, 1, lane.kind, on_host=name not in self._far))
        lane.open(self._now)

    def _leaves(self, name: str) -> None:
        self._lanes[name].stop()

    def _ends(self, time: float, lane: VirtualLane, run: ChunkRun) -> None:
        self._push(time, partial(self._end, lane, run, run.version))

    def _end(self, lane: VirtualLane, run: ChunkRun, version: int) -> None:
        chunk, count = run.chunk, len(run.ends)
        if run.version != version or lane.running.get(chunk.number) is not run:
            return
        lane.end(self._now, run)
        if chunk.kind == "inspect":
            self._tell(self._inspected(run))
            return
        serials, spent = run.serials(), run.ends[-1] - run.begin
        if lane.kind == m.DEVICE:
            self._device_s += spent
            self.made_on.update(dict.fromkeys(serials, chunk.lane))
        far = self._far.get(lane.name)
        there = self._now + self._trip_s if far is None else far.arrival(self._now, len(serials))
        report = m.Finished(there, chunk.number, count, spent, 1000 * len(serials))
        if chunk.stop >= 0:
            handed = tuple((offset, chunk.stop) for offset in range(count))
            report = replace(report, nbytes=0, handed=handed, handed_bytes=1000 * count)
        if there > self._now:
            self._push(there, partial(self._arrive, lane.name, report))
        else:
            self._tell(report)

    def _arrive(self, lane: str, report: m.Finished) -> None:
        """Takes in a report; one of a node that has left meanwhile is dropped."""
        far = self._far.get(lane)
        if far is not None:
            if report.time >= far.leaves_at:
                return
            self._away[lane].discard(report.chunk)
        self._tell(report)

    def _lose(self, lane: str) -> None:
        """Gives up a node that has been silent for so long that others are to do what it had."""
        self._tell(m.LaneOpened(self._now, lane, -self._far[lane].slots))
        for number in sorted(self._away[lane]):
            self._tell(m.Finished(self._now, number, 0, 0.0))

    def _inspected(self, run: ChunkRun) -> m.Inspected:
        """Returns the event that headers have been read: what their samples are predicted to cost, nan for a lane that
        has prepared fewer than ``LEARNED`` samples."""
        work, serials = self._work, run.serials()
        learned = dict.fromkeys((m.CPU, m.DEVICE), 0)
        for lane in self._lanes.values():
            learned[lane.kind] += lane.prepared
        unknown = np.full(len(serials), np.nan)
        cpu, device = (
            unknown if costs is None or learned[kind] < LEARNED else costs[serials]
            for kind, costs in ((m.CPU, work.predicted_cpu), (m.DEVICE, work.predicted_device))
        )
        return m.Inspected(self._now, run.chunk.number, cpu.tolist(), device.tolist())

    def _look(self, now: float) -> None:
        """Tells how far the unfinished chunks have come, as the shell does when ``wake_at`` comes."""
        self._now = now
        for lane in list(self._lanes.values()):
            for running in lane.look(now):
                self._tell(running)
        self._tell(m.Tick(now))

    # --- the shell ------------------------------------------------------------------------------------------

    def _tell(self, event: m.Event) -> None:
        for instruction in self.scheduler.handle(event):
            if isinstance(instruction, m.Dispatch):
                self._lanes[instruction.chunk.lane].send(self._now, instruction.chunk)
                if instruction.chunk.lane in self._far:
                    self._away[instruction.chunk.lane].add(instruction.chunk.number)
            elif isinstance(instruction, m.Compose):
                self._composed[instruction.order] = instruction
            elif isinstance(instruction, m.HandOver):
                self._lanes[instruction.lane].hand_over(self._now, instruction.chunk, instruction.splits)
            else:
                for revoked in self._lanes[instruction.lane].revoke(self._now, instruction.chunk, instruction.keep):
                    self._tell(revoked)

    def _admit(self) -> None:
        """Lets the sampler's next batches into the window."""
        work, policy = self._work, self._policy
        while (at := self._admitted) < work.batches and self.scheduler.room >= work.sizes[at] and self._may_draw(at):
            self._admitted += 1
            first, stop, epoch = int(work.firsts[at]), int(work.firsts[at + 1]), int(work.epochs[at])
            inspected = work.header_s is not None
            cpu, device = (None if costs is None or inspected else costs[first:stop] for costs in self._costs)
            between = [work.plans(serial) for serial in range(first, stop)] if work.cuts else None
            home = policy.homes[(at - work.begins[at]) % policy.devices % len(policy.homes)]
            after = int(work.firsts[np.searchsorted(work.epochs, epoch, side="right")]) - stop
            what = SourceBatch(at), epoch, TicketId(first), stop - first
            self._tell(m.Admitted(self._now, *what, cpu, device, after == 0, between=between, home=home, follow=after))

    def _may_draw(self, batch: int) -> bool:
        """Returns whether a batch may be drawn; only an epoch's first may have to wait. With ``ahead`` 0 it waits until
        the last step of the epoch before is over, with 1 for the epoch before that; with None it never waits."""
        begins, delivered = self._work.begins, len(self._delivered)
        if batch == 0 or begins[batch] != batch or self._ahead is None:
            return True
        after = begins[batch - 1] if self._ahead else batch
        return delivered > after or (delivered == after and self._now >= self._consumer_ready)

    def _consume(self) -> None:
        while self._now >= self._consumer_ready:
            order = OutputBatch(len(self._delivered))
            if order not in self._composed:
                if not self._asked and order < self._work.batches:
                    self._asked = True
                    self._tell(m.Asked(self._now))
                if order not in self._composed:
                    return
            batch = self._composed.pop(order)
            self._delivered.append((self._now, batch))
            self._asked = False
            period = self._steps[order]
            step_s, self._step_s = self._step_s, period and period + self._work.harm * self._device_s
            self._device_s = 0.0
            self._consumer_ready = self._now + self._step_s
            if period:
                self._push(self._consumer_ready, lambda: None)  # the step ends: then the consumer asks again
            self._tell(m.Delivered(self._now, order, step_s))
            self._admit()

    def _outcome(self) -> Outcome:
        times = np.array([time for time, _ in self._delivered])
        spans = [span for _, batch in self._delivered for span in batch.spans]
        serials = np.concatenate([np.arange(lo, hi) for lo, hi in spans])
        return Outcome(times, serials)


def run_together(loaders: Sequence[VirtualLoader]) -> list[Outcome]:
    """Simulates loaders that begin at the same time, until each has delivered every batch.

    What happens first is done first: they may share links. What one does changes no time of another's next event.
    """
    for each in loaders:
        each._open()
    events = [(0.0, number) for number, each in enumerate(loaders) if not each._is_done()]
    while events:
        _, number = heappop(events)
        loaders[number]._step()
        if not loaders[number]._is_done():
            heappush(events, (loaders[number]._next_at(), number))
    return [each._outcome() for each in loaders]
