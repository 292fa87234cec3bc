"""The scheduler of production under a virtual clock: lanes with slots, true costs, a consumer with a period.

Everything that the shell does in production happens here to the same state machine: workers start one by one, take
chunks from their lane's queue in order, report what is done when a chunk ends or when the scheduler asks to look,
and give back what is revoked. Nothing is random: the work brings its own numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from minato_gpu.samples import OutputBatch, SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from minato_gpu.simulation.progress import Progress
from minato_gpu.simulation.work import Outcome, Work


class _Lane:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.free = 0
        self.queue: deque[m.Chunk] = deque()


class _Run:
    """A chunk on its slot: ``ends`` are the times at which its samples become ready."""

    __slots__ = ("begin", "chunk", "ends", "version")

    def __init__(self, chunk: m.Chunk, begin: float, ends: list[float]) -> None:
        self.chunk = chunk
        self.begin = begin
        self.ends = ends
        self.version = 0

    def done(self, now: float) -> int:
        return sum(end <= now for end in self.ends)

    def serials(self) -> list[int]:
        return [serial for lo, hi in self.chunk.spans for serial in range(lo, hi)][: len(self.ends)]


class VirtualLoader:
    """One simulated run; ``run`` returns its outcome.

    ``period``: seconds that the consumer takes for a batch (0: it asks again at once). ``overlap``: whether the next
    epoch's samples are admitted before the last one's batches are delivered. ``trip_s``: how long a report takes
    to the scheduler and its answer back.
    """

    def __init__(
        self, work: Work, policy: Policy, period: float = 0.0, overlap: bool = True, trip_s: float = 0.0
    ) -> None:
        self.scheduler = Scheduler(policy)
        self._work = work
        self._period = period
        self._overlap = overlap
        self._trip_s = trip_s
        self._progress = Progress(work)
        self._told_cpu: list[float] = work.predicted_cpu.tolist()
        self._told_device = None if work.predicted_device is None else work.predicted_device.tolist()
        self._events: list[tuple[float, int, str, object]] = []
        self._number = 0
        self._now = 0.0
        self._lanes = {m.CPU: _Lane(m.CPU)}
        self._runs: dict[int, _Run] = {}
        self._composed: dict[OutputBatch, m.Compose] = {}
        self._admitted = 0
        self._delivered: list[tuple[float, m.Compose]] = []
        self._consumer_ready = 0.0
        self._asked = False
        self._step_s = 0.0  # of the consumer's last step
        self._device_s = 0.0  # device work that the next step will feel
        self.made_on: dict[int, str] = {}  # which device prepared a sample, by serial; the others are the CPU's

    def run(self) -> Outcome:
        """Simulate until every batch is delivered."""
        work = self._work
        for number in range(work.devices):
            self._push(work.startup_s, "open", f"device:{number}")
        for time in work.ready_times():
            self._push(time, "open", m.CPU)
        while True:
            self._admit()
            self._consume()
            if len(self._delivered) == work.batches:
                return self._outcome()
            self._step()

    # --- time -----------------------------------------------------------------------------------------------

    def _push(self, time: float, kind: str, what: object) -> None:
        self._number += 1
        heappush(self._events, (time, self._number, kind, what))

    def _step(self) -> None:
        wake = self.scheduler.wake_at()
        if wake is not None and (not self._events or wake < self._events[0][0]):
            self._look(max(wake, self._now))
            return
        if not self._events:
            raise RuntimeError(f"deadlock at {self._now} after {len(self._delivered)} batches")
        self._now, _, kind, what = heappop(self._events)
        if kind == "open":
            assert isinstance(what, str)
            lane = self._lanes.setdefault(what, _Lane(m.CPU if what == m.CPU else m.DEVICE))
            lane.free += 1
            self._tell(m.LaneOpened(self._now, what, 1, lane.kind))
            self._start(lane)
        elif kind == "end":
            assert isinstance(what, tuple)
            self._end(*what)
        elif kind == "report":
            assert isinstance(what, m.Finished)
            self._tell(what)

    def _end(self, number: int, version: int) -> None:
        run = self._runs.get(number)
        if run is None or run.version != version:
            return
        del self._runs[number]
        lane = self._lanes[run.chunk.lane]
        lane.free += 1
        self._start(lane)
        count = len(run.ends)
        spent = self._now - run.begin
        if lane.kind == m.DEVICE:
            self._device_s += spent
            self.made_on.update(dict.fromkeys(run.serials(), run.chunk.lane))
        report = m.Finished(self._now + self._trip_s, number, count, spent, 1000 * count)
        stop = run.chunk.stop
        if stop >= 0:
            self._progress.came_to(run.serials(), stop)
            handed = tuple((offset, stop) for offset in range(count))
            report = replace(report, nbytes=0, handed=handed, handed_bytes=1000 * count)
        if self._trip_s:
            self._push(report.time, "report", report)
        else:
            self._tell(report)

    def _look(self, now: float) -> None:
        """Report every unfinished chunk of several samples, as the shell does when ``wake_at`` comes."""
        self._now = now
        for run in list(self._runs.values()):
            if run.chunk.kind == "run" and (len(run.ends) > 1 or self._work.cuts):
                done = run.done(now)
                since = now - (run.ends[done - 1] if done else run.begin)
                if done < len(run.ends) and self._lanes[run.chunk.lane].kind == m.CPU:
                    self._tell(m.Running(now, run.chunk.number, done, since))
        self._tell(m.Tick(now))

    # --- the shell ------------------------------------------------------------------------------------------

    def _tell(self, event: m.Event) -> None:
        for instruction in self.scheduler.handle(event):
            if isinstance(instruction, m.Dispatch):
                lane = self._lanes[instruction.chunk.lane]
                lane.queue.append(instruction.chunk)
                self._start(lane)
            elif isinstance(instruction, m.Compose):
                self._composed[instruction.order] = instruction
            elif isinstance(instruction, m.HandOver):
                self._hand_over(instruction)
            else:
                self._revoke(instruction)

    def _start(self, lane: _Lane) -> None:
        while lane.free and lane.queue:
            lane.free -= 1
            chunk = lane.queue.popleft()
            device = lane.kind == m.DEVICE
            time = self._now + (self._work.device_run_s if device else 0.0)
            ends = []
            for lo, hi in chunk.spans:
                for serial in range(lo, hi):
                    time += self._progress.seconds(serial, device, chunk.stop)
                    ends.append(time)
            self._runs[chunk.number] = _Run(chunk, self._now, ends)
            self._push(time, "end", (chunk.number, 0))

    def _hand_over(self, instruction: m.HandOver) -> None:
        """The sample stops at the next of the split points named, if there is one before its end."""
        run = self._runs.get(instruction.chunk)
        if run is None or len(run.ends) != 1:
            return
        serial = run.chunk.spans[0][0]
        found = self._progress.next_stop(serial, instruction.splits, run.begin, self._now, run.ends[0])
        if found is not None:
            split, time = found
            run.chunk = replace(run.chunk, stop=split)
            run.ends = [time]
            run.version += 1
            self._push(time, "end", (instruction.chunk, run.version))

    def _revoke(self, instruction: m.Revoke) -> None:
        run = self._runs.get(instruction.chunk)
        if run is None:
            return
        keep = max(instruction.keep, run.done(self._now) + 1)
        if keep < len(run.ends):
            del run.ends[keep:]
            run.version += 1
            self._push(run.ends[-1], "end", (instruction.chunk, run.version))
            self._tell(m.Revoked(self._now, instruction.chunk, keep))

    def _admit(self) -> None:
        work = self._work
        while self._admitted < work.batches:
            at = self._admitted
            first, size, epoch = int(work.firsts[at]), int(work.sizes[at]), int(work.epochs[at])
            if self.scheduler.room < size:
                return
            begins = at > 0 and epoch != work.epochs[at - 1]
            if begins and not self._overlap and (len(self._delivered) < at or self._now < self._consumer_ready):
                return
            self._admitted += 1
            stop = first + size
            device = None if self._told_device is None else self._told_device[first:stop]
            last = self._admitted == work.batches or work.epochs[at + 1] != epoch
            cpu = self._told_cpu[first:stop]
            between = [work.plans(serial) for serial in range(first, stop)] if work.cuts else None
            place, serial = SourceBatch(at), TicketId(first)
            known = m.Admitted(self._now, place, epoch, serial, size, cpu, device, bool(last), between=between)
            homes = self.scheduler.policy.homes
            self._tell(replace(known, home=homes[self.home(at) % len(homes)]))

    def home(self, batch: int) -> int:
        """The number of the device that a batch goes to."""
        begins = int(np.searchsorted(self._work.epochs, self._work.epochs[batch]))
        return (batch - begins) % self.scheduler.policy.devices

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
            step_s, self._step_s = self._step_s, self._period and self._period + self._work.harm * self._device_s
            self._device_s = 0.0
            self._consumer_ready = self._now + self._step_s
            if self._period:
                self._push(self._consumer_ready, "consumer", None)
            self._tell(m.Delivered(self._now, order, step_s))
            self._admit()

    def _outcome(self) -> Outcome:
        times = np.array([time for time, _ in self._delivered])
        spans = [span for _, batch in self._delivered for span in batch.spans]
        serials = np.concatenate([np.arange(lo, hi) for lo, hi in spans])
        return Outcome(times, serials)
