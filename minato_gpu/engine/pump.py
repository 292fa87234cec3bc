"""Between lanes and the runs of a scheduler: what a lane reports goes to the run that it is about.

No thread, no lock, no waiting: whoever calls holds the engine's lock. When a run (run.py) is given up (the consumer
left an epoch in the middle), what workers are still at stays in its memory until they are through, so that their late
writes never reach a batch of the next run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import perf_counter
from typing import Any

from minato_gpu.engine.parts import Parts
from minato_gpu.engine.read_ahead import ReadAhead
from minato_gpu.engine.run import Run
from minato_gpu.lanes import contract as c
from minato_gpu.lanes.base import Report
from minato_gpu.lanes.contract import Lane
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.scheduling import messages as m


class Pump:
    """The lanes, and one run of the scheduler at a time."""

    def __init__(self, parts: Parts) -> None:
        self.bell, self.completions = parts.links.bell, parts.links.completions
        self.lanes, self.assembly = parts.lanes, parts.assembly
        self.estimates, self.deaths = parts.estimates, parts.deaths
        self.run = Run(0, parts)
        self.shown = Telemetry(perf_counter())  # the log of the epoch that is delivered, or was last
        self.on_open: Callable[[], None] = lambda: None  # called when a lane has loaded its libraries
        # workers that ended, each with its lane; ``lost`` deals with them
        self.faults: deque[tuple[Lane, c.Exit]] = deque()
        # tasks of workers by lane, as reported since that was last asked for
        self.at_work: dict[str, tuple[c.AtWork, ...]] = {}
        self.reads = parts.reads
        self._parts, self._settings = parts, parts.settings
        self._slots = dict.fromkeys(self.lanes, 0)  # open slots by lane, without lost ones
        self._known: dict[str, m.LaneCosts] = {}  # what samples took in runs before
        self.loading = set(self.lanes)  # names of lanes that have not yet reported whether they can begin
        self._broken: dict[str, c.Broken] = {}
        self._awaited: m.Awaited | None = None
        # of each run that was given up: its chunks (run, number) that lanes are still at, marks, and other memory
        self._abandoned: list[tuple[set[c.Number], list[int], list[object]]] = []
        self._arrived: deque[tuple[Lane, c.Message]] = deque()  # to be taken in; where that raises, the rest stays

    def new_run(self) -> None:
        """Forgets every ticket and begins with a new scheduler; ``open_lanes`` then lets it send work."""
        ended = self.run
        self._known.update(ended.scheduler.lane_costs)
        ended.revoke_all()
        for lane in self.lanes.values():
            lane.recall()
        marks, memory = self.assembly.clear()
        marks += [each.task.pieces[0].marks for each in ended.sent if each.chunk.kind == "collate"]
        chunks = {(ended.number, each.chunk.number) for each in ended.sent}
        self._abandoned.append((chunks, marks, memory))
        self._free_abandoned()
        if self.reads is not None:
            self.reads.new_run()
        self.run = Run(ended.number + 1, self._parts)
        self.run.stream_starts = ended.stream_starts  # starts of workers that were not asked for a batch: they stay
        for lane in self.lanes.values():  # no mark of that run is to be taken for one of the next
            lane.look()
            for message in lane.receive():
                if isinstance(message, Report):
                    self._drop(message)
                else:
                    self._arrived.append((lane, message))
        self.deaths.begin_run()
        if self.estimates is not None:
            self.estimates.begin_run()

    def open_lanes(self) -> None:
        """Tells the scheduler which slots there are. A lane that is still loading opens when it is ready."""
        for lane in self.lanes.values():
            if self._slots[lane.name]:
                self._open(lane, self._slots[lane.name])
        self.receive()

    def _open(self, lane: Lane, slots: int) -> None:
        if self.run.number:
            known = self._known.get(lane.name)
            self.run.handle(m.LaneOpened(perf_counter(), lane.name, slots, lane.kind, known, lane.on_host))

    def check_lanes(self) -> None:
        """Raises RuntimeError if a lane that no other can replace will never open, or has broken down."""
        for name, broken in self._broken.items():
            what = "cannot be opened" if name in self.loading else "has broken down"
            raise RuntimeError(f"the {name} lane {what}: {broken.error!r}") from broken.error

    @property
    def needs_attention(self) -> bool:
        """True if reports will need an answer before the consumer asks for its next batch."""
        needs_jobs = self.assembly.needs_jobs and not self._settings.streams
        follows = needs_jobs or self.assembly.loading is not None
        comes = self.reads is not None and self.reads.pending
        return self.run.scheduler.pending or comes or (follows and bool(self.run.scheduler.flights))

    def receive(self) -> None:
        """Takes in all that lanes have reported, and does what follows from it."""
        if self.assembly.loading is not None:
            self.assembly.loading.host.clear()
        if self.reads is not None and (fetched := self.reads.receive()):
            spans, copies = ([part[1:] for part in self.assembly.window.parts(each)] for each in fetched)
            self.run.handle(m.Fetched(perf_counter(), spans, copies))
        for lane in self.lanes.values():
            self._take_in(lane, lane.receive())
        self._take_awaited()
        if self.reads is not None:
            self.reads.say()

    def _take_in(self, lane: Lane, told: Iterable[c.Message]) -> None:
        self._arrived += [(lane, message) for message in told]
        while self._arrived:
            sender, message = self._arrived.popleft()
            if not isinstance(message, Report):
                self._hear(sender, message)
            elif message.run == self.run.number:
                self.run.reported(sender, message, self.shown)
            else:
                self._drop(message)

    # --- what lanes tell ------------------------------------------------------------------------------------

    def _hear(self, lane: Lane, message: c.Message) -> None:
        match message:
            case c.KeptSamples(run) if run == self.run.number:
                self.run.handle(m.Revoked(perf_counter(), message.chunk, message.keep, message.nbytes))
            case c.Progress():
                self._progress(lane, message.at_work)
            case c.Recalled():
                for task in message.tasks:
                    self._recalled(*task)
            case c.Opened():
                if lane.name in self.loading:
                    self.loading.discard(lane.name)
                    self.on_open()
                self._change(lane, message.slots)
            case c.Retired():
                self.loading.discard(lane.name)
                self._offered(lane, None)
                if slots := self._slots[lane.name]:
                    self._change(lane, -slots)
            case c.Offers():
                self._offered(lane, message)
            case c.Broken():
                self._broken[lane.name] = message
            case c.Exit():
                self.faults.append((lane, message))

    def _recalled(self, run: int, chunk: int) -> None:
        if run == self.run.number:
            self.run.recalled(chunk)
        else:
            self._left(run, chunk)

    def _progress(self, lane: Lane, at_work: tuple[c.AtWork, ...]) -> None:
        self.at_work[lane.name] = at_work
        now = perf_counter()
        for each in at_work if lane.shows_progress else ():
            if each.claim.run == self.run.number:
                self.run.progress(each, now)

    def _change(self, lane: Lane, slots: int) -> None:
        """Notes that a lane has so many more slots, or fewer."""
        self._slots[lane.name] += slots
        self._open(lane, slots)

    def _offered(self, lane: Lane, offers: c.Offers | None) -> None:
        if self.estimates is not None:
            self.estimates.offered(lane.name, offers)

    # --- what the consumer waits for ------------------------------------------------------------------------

    def listen(self) -> bool:
        """Lets workers ring once the batch that the consumer waits for is complete; returns whether it is already.

        To be called after ``receive``.
        """
        self.sleep()
        return self._awaited is not None and self.bell.await_tickets(*self._marks(self._awaited), self._awaited.need)

    def sleep(self) -> None:
        """Tells all lanes that nobody is about to look at reports, and when to wake somebody (see ``Lane.sleep``)."""
        every_task = self.assembly.loading is not None or self._settings.streams  # each task is some worker's own
        for lane in self.lanes.values():
            lane.sleep(every_task=every_task)

    def _marks(self, awaited: m.Awaited) -> tuple[int, int]:
        """Returns the range of marks that holds what the consumer waits for."""
        lo, hi = awaited.span
        record = self.assembly.window.at(lo)
        if awaited.exactly and record.first == lo and record.rows == hi - lo:
            return record.marks, record.marks + record.rows
        return self.completions.ready_anywhere

    def _take_awaited(self) -> None:
        """Takes in what is finished of leases under way, if that completes the next batch."""
        awaited = self._awaited = self.run.scheduler.awaited
        if awaited is None:
            return
        ready, taken = self.completions.ready(*self._marks(awaited)), False
        if ready < awaited.need:
            return
        lo, hi = awaited.span
        sent = [each.chunk for each in self.run.sent if each.chunk.kind in ("run", "next")]
        wanted = {chunk.number: chunk for chunk in sent for a, b in chunk.spans if a < hi and lo < b}
        for chunk in wanted.values():
            lane = self.lanes[chunk.lane]
            told = lane.receive([(self.run.number, chunk.number)])
            taken = taken or bool(told)
            self._take_in(lane, told)
            self._awaited = self.run.scheduler.awaited
            if self._awaited is None:
                return
        if not taken:  # what is ready is of no lease that is asked: without this the consumer would never sleep
            self._awaited = replace(awaited, need=ready + 1)

    def _drop(self, report: Report) -> None:
        """Drops a report of an earlier run: frees what it brings, and what that run held once its last chunk has ended.

        A sample's layout is true of every run: nobody is asked for it a second time.
        """
        if report.layout is not None:
            self.assembly.samples.learn(report.layout)
        for item in report.items or ():
            self.assembly.holdings.release(item)
        if report.final:
            self._left(report.run, report.chunk)

    def _left(self, run: int, chunk: int) -> None:
        """Notes that nobody is at this chunk any more."""
        for chunks, *_ in self._abandoned:
            chunks.discard((run, chunk))
        self._free_abandoned()

    def _free_abandoned(self) -> None:
        """Frees the memory of runs that were given up, of which no chunk is left."""
        for block in (block for chunks, marks, _ in self._abandoned if not chunks for block in marks):
            self.completions.give_back(block)
        self._abandoned = [entry for entry in self._abandoned if entry[0]]

    def read_stats(self, reads: ReadAhead) -> dict[str, Any]:
        """Returns the entries of ``stats()`` on what is read ahead, and by workers themselves."""
        found, (direct, seconds) = reads.stats(), self._parts.links.board.read_directly()
        idle_s = self.run.scheduler.fetching.idle_s
        found["reads"] |= {"by_workers": direct, "by_workers_s": seconds, "workers_idle_s": idle_s}
        return found

    # --- workers that have died ----------------------------------------------------------------------------

    def lost(self, lane: Lane, exit_: c.Exit) -> None:
        """Handles a worker of the lane that has ended, after all its reports: others do what else it had taken.

        Raises WorkerDied if a replacement would do no better.
        """
        self._slots[lane.name] -= 1
        self._left(exit_.claim.run, exit_.claim.chunk)
        self.shown.died(hung=bool(exit_.hung))
        self.run.lost(lane, exit_, self.shown)
        self.deaths.check_start(lane.name, exit_)
        lane.replace(exit_.number, sorted({*self.assembly.bury_worker(exit_.number)}) if lane.has_arenas else ())
        self.shown.workers["replaced"] += 1

    # --- what runs ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Tells the scheduler how far the unfinished chunks have come."""
        self.ask()
        self.run.handle(m.Tick(perf_counter()))

    def ask(self) -> None:
        """Asks lanes what is finished and what they are at, and takes in what they answer at once."""
        self.at_work.clear()
        for lane in self.lanes.values():
            lane.look()
        self.receive()
        if self.run.awaits_answer:
            self.run.awaits_answer = False
            self.receive()
