"""Between the scheduler and the lanes: reports become events, instructions become tasks.

No thread, no lock, no waiting: whoever calls holds the engine's lock. A *run* is one life of a scheduler; when a run
is given up (the consumer left an epoch in the middle), what workers are still at stays in its memory until they are
through, so that their late writes never reach a batch of the next run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any, Protocol

from minato_gpu.engine.abandoned import AbandonedRuns
from minato_gpu.engine.deaths import Deaths
from minato_gpu.engine.jobs import Jobs
from minato_gpu.estimates.estimator import Estimator
from minato_gpu.estimates.observations import inspected, observe
from minato_gpu.event_log import EventLog
from minato_gpu.lanes import contract as c
from minato_gpu.lanes.base import Features, Handed, Piece, Report, Task, Unshippable
from minato_gpu.lanes.contract import Lane
from minato_gpu.lanes.links import Links
from minato_gpu.lanes.streams import StreamStart
from minato_gpu.memory.board import Claim
from minato_gpu.samples import Origin, Ticket
from minato_gpu.sampling.streams import WorkerStreams
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.flights import cut
from minato_gpu.telemetry import Telemetry
from minato_gpu.window.assembly import Assembly
from minato_gpu.window.records import Record

_FIRST = 1  # the first run: workers have a data pipe's seed from the data set that they were started with


class AnyScheduler(Protocol):
    """What the engine needs of ``Scheduler`` and ``StreamScheduler``."""

    def handle(self, event: Any) -> list[Any]:
        """Take one event; return what to do now."""

    @property
    def pending(self) -> bool:
        """Whether something waits for a lane to become free."""

    @property
    def awaited(self) -> m.Awaited | None:
        """What the next batch still needs, where that is known."""

    def wake_at(self) -> float | None:
        """When to report unfinished chunks."""

    def stall_cause(self) -> str:
        """Why the consumer waits."""


class Sent:
    """A chunk on its way: what it holds, when it went, and for which epoch; samples before ``done`` are reported, those
    from ``stop`` on were taken back."""

    __slots__ = ("chunk", "done", "epoch", "sent", "stop")

    def __init__(self, chunk: m.Chunk, epoch: int, sent: float) -> None:
        self.chunk = chunk
        self.epoch = epoch
        self.sent = sent
        self.done = 0
        self.stop = chunk.size


class Pump:
    """One scheduler at a time, the lanes by name (first the CPU's), and the assembly.

    ``seeds`` and ``logs``: the base seed and the log of each epoch that has tickets here. ``stream_batch``: samples of
    a batch where workers iterate the data set for themselves. ``cuts``: samples may go on from one lane to another.
    """

    def __init__(
        self,
        links: Links,
        lanes: Mapping[str, Lane],
        assembly: Assembly,
        make_scheduler: Callable[[], AnyScheduler],
        *,
        estimates: Estimator | None = None,
        recorder: EventLog | None = None,
        stream_batch: int = 1,
        cuts: bool = False,
        deaths: Deaths | None = None,
    ) -> None:
        self.bell, self.completions = links.bell, links.completions
        self.lanes = lanes
        self.assembly = assembly
        self.estimates = estimates
        self.recorder = recorder
        self.deaths = deaths or Deaths()
        self.logs: dict[int, Telemetry] = {}  # by epoch; a prefetched one has its own already
        self.shown: Telemetry | None = None  # that of the epoch that is delivered, or was last
        self.seeds: dict[int, int] = {}
        self.on_open: Callable[[], None] = lambda: None  # called when a lane has loaded its libraries
        self.streams: WorkerStreams | None = None  # where workers' own streams stand, in the epoch that runs
        self.stream_starts: dict[int, StreamStart] = {}  # by worker: where its stream is to begin
        self.faults: deque[tuple[Lane, c.Exit | c.Arrived]] = deque()  # which others deal with, see ``lost``
        self.at_work: dict[str, tuple[c.AtWork, ...]] = {}  # by lane, as told since it was last asked for
        self._slots = dict.fromkeys(lanes, 0)  # that lanes have opened, and are not lost
        self._loading = set(lanes)  # those that have yet to tell whether they can begin
        self._broken: dict[str, c.Broken] = {}
        self._awaits_answer = False  # something was revoked
        self._hear: dict[type, Callable[[Lane, Any], None]] = {
            c.Opened: self._opened,
            c.Retired: self._retired,
            c.Broken: self._broke,
            c.Offers: self._offers,
            c.Revoked: self._revoked,
            c.Recalled: self._recalled,
            c.Progress: self._progress,
            c.Exit: self._fault,
            c.Arrived: self._fault,
        }
        self._make_scheduler = make_scheduler
        self._stream_batch = stream_batch
        self._cuts = cuts
        self._run = 0
        self._awaited: m.Awaited | None = None
        self._stale = AbandonedRuns(assembly.holdings)
        self._sent: dict[int, Sent] = {}
        self._arrived: deque[tuple[Lane, c.Message]] = deque()  # to be taken in; where that raises, the rest stays
        self._jobs = Jobs(assembly, self.deaths)
        self.scheduler = make_scheduler()

    def new_run(self) -> None:
        """Forget every ticket and begin with a new scheduler; ``open_lanes`` lets it send work."""
        self.revoke_all()
        stale = {(self._run, number) for number in self._sent}
        for lane in self.lanes.values():
            lane.recall()
        self._stale.add(stale, self.assembly.clear())
        self._run += 1
        for lane in self.lanes.values():  # no mark of that run is to be taken for one of the next
            lane.look()
            for message in lane.receive():
                if isinstance(message, Report):
                    self._drop(message)
                else:
                    self._arrived.append((lane, message))
        self._sent, self.seeds, self.logs = {}, {}, {}
        self._jobs.clear()
        self.scheduler = self._make_scheduler()
        self.deaths.begin_run()
        if self.estimates is not None:
            self.estimates.begin_run()
        if self.recorder is not None:
            self.recorder.begin()

    def open_lanes(self) -> None:
        """Tell the scheduler what slots there are; a lane that is still loading opens when it is ready."""
        for lane in self.lanes.values():
            if self._slots[lane.name]:
                self._open(lane, self._slots[lane.name])
        self.receive()

    def _open(self, lane: Lane, slots: int) -> None:
        if self._run:  # the first scheduler is none of a run
            self.handle(m.LaneOpened(perf_counter(), lane.name, slots, lane.kind))

    def add_epoch(self, number: int, seed: int) -> None:
        """Tickets of this epoch will come."""
        self.seeds[number] = seed
        log = self.logs[number] = Telemetry(None, perf_counter())
        for lane in self.lanes.values():
            log.lanes[lane.name].slots = lane.slots

    def revoke_all(self) -> None:
        """Let no worker start another sample of what it was sent."""
        for sent in self._sent.values():
            self.lanes[sent.chunk.lane].revoke(self._run, sent.chunk.number, 0)

    def check_lanes(self) -> None:
        """Raise RuntimeError where a lane that nobody else can stand in for will never open, or has broken down."""
        for name, broken in self._broken.items():
            what = "cannot be opened" if name in self._loading else "has broken down"
            raise RuntimeError(f"the {name} lane {what}: {broken.error!r}") from broken.error

    @property
    def needs_attention(self) -> bool:
        """Whether reports will need an answer before the consumer asks for its next batch."""
        follows = self.assembly.needs_jobs or self.assembly.loading is not None
        return self.scheduler.pending or bool(self._loading) or (follows and bool(self._sent))

    def receive(self) -> None:
        """Take in all that lanes have told, and do what follows from it."""
        if self.assembly.loading is not None:
            self.assembly.loading.clear()
        for lane in self.lanes.values():
            self._take_in(lane, lane.receive())
        self._take_awaited()

    def _take_in(self, lane: Lane, told: Iterable[c.Message]) -> None:
        self._arrived.extend((lane, message) for message in told)
        while self._arrived:
            sender, message = self._arrived.popleft()
            if not isinstance(message, Report):
                self._hear[type(message)](sender, message)
            elif message.run == self._run:
                self._reported(sender, message)
            else:
                self._drop(message)

    # --- what lanes tell ------------------------------------------------------------------------------------

    def _opened(self, lane: Lane, opened: c.Opened) -> None:
        self._loading.discard(lane.name)
        self._slots[lane.name] += opened.slots
        self.on_open()
        self._open(lane, opened.slots)

    def _retired(self, lane: Lane, _: c.Retired) -> None:
        self._loading.discard(lane.name)
        slots, self._slots[lane.name] = self._slots[lane.name], 0
        if self.estimates is not None:
            self.estimates.offered(lane.name, None)
        if slots:
            self._open(lane, -slots)

    def _broke(self, lane: Lane, broken: c.Broken) -> None:
        self._broken[lane.name] = broken

    def _offers(self, lane: Lane, offers: c.Offers) -> None:
        if self.estimates is not None:
            self.estimates.offered(lane.name, offers)

    def _revoked(self, lane: Lane, revoked: c.Revoked) -> None:
        sent = self._sent.get(revoked.chunk) if revoked.run == self._run else None
        if sent is not None:
            sent.stop = min(revoked.keep, sent.stop)
            self.handle(m.Revoked(perf_counter(), revoked.chunk, revoked.keep))

    def _recalled(self, lane: Lane, recalled: c.Recalled) -> None:
        for run, chunk in recalled.tasks:
            self._stale.through(run, chunk)

    def _progress(self, lane: Lane, progress: c.Progress) -> None:
        self.at_work[lane.name] = progress.at_work
        now = perf_counter()
        for each in progress.at_work if lane.shows_progress else ():
            sent = self._sent.get(each.claim.chunk) if each.claim.run == self._run else None
            if sent is not None and sent.chunk.kind == "run" and (sent.chunk.size > 1 or self._cuts):
                done = max(0, each.claim.started - 1)
                self.handle(m.Running(now, sent.chunk.number, done, now - each.since))

    def _fault(self, lane: Lane, fault: c.Exit | c.Arrived) -> None:
        self.faults.append((lane, fault))

    # --- what the consumer waits for ------------------------------------------------------------------------

    def listen(self) -> bool:
        """Let workers ring once the batch that the consumer waits for is complete; returns whether it is. To be called
        after ``receive``."""
        self.sleep()
        return self._awaited is not None and self.bell.await_tickets(*self._marks(self._awaited), self._awaited.need)

    def sleep(self) -> None:
        """Nobody is about to look at what lanes tell."""
        for lane in self.lanes.values():
            lane.sleep(every_task=self.assembly.loading is not None)

    def stop_listening(self) -> None:
        """The consumer waits no more."""
        self.bell.await_nothing()

    def _marks(self, awaited: m.Awaited) -> tuple[int, int]:
        """The marks among which it is to be looked for what is awaited."""
        lo, hi = awaited.span
        record = self.assembly.window.at(lo)
        if awaited.exactly and record.marks >= 0 and record.first == lo and record.rows == hi - lo:
            return record.marks, record.marks + record.rows
        return self.completions.ready_anywhere

    def _take_awaited(self) -> None:
        """Take in what is finished of leases that are under way, if that completes the next batch."""
        awaited = self._awaited = self.scheduler.awaited
        if awaited is not None and awaited.exactly and self.assembly.window.at(awaited.span[0]).marks < 0:
            awaited = self._awaited = None  # messages tell, and wake by themselves
        if awaited is None or self.completions.ready(*self._marks(awaited)) < awaited.need:
            return
        lo, hi = awaited.span
        sent = [each.chunk for each in self._sent.values() if each.chunk.kind == "run"]
        wanted = [chunk for chunk in sent if any(a < hi and lo < b for a, b in chunk.spans)]
        for chunk in wanted:
            lane = self.lanes[chunk.lane]
            self._take_in(lane, lane.receive([(self._run, chunk.number)]))
            self._awaited = self.scheduler.awaited
            if self._awaited is None:
                return

    def _drop(self, report: Report) -> None:
        """A report of an earlier run: free what it brings, and what that run held once its last chunk is through.

        What a sample looks like is true of every run: nobody is asked for that a second time.
        """
        if report.layout is not None:
            self.assembly.learn(report.layout)
        for item in report.items or ():
            self.assembly.holdings.release(item.fields if isinstance(item, (Features, Handed)) else item)
        if report.final:
            self._stale.through(report.run, report.chunk)

    # --- workers that have died ----------------------------------------------------------------------------

    def lost(self, lane: Lane, exit_: c.Exit, log: Telemetry) -> None:
        """A worker of the lane has ended, and all that it had reported is received: others do what else it had taken.

        Raises WorkerDied where a replacement would do no better.
        """
        claim = exit_.claim
        self._slots[lane.name] -= 1
        self._stale.through(claim.run, claim.chunk)
        sent = self._sent.pop(claim.chunk, None) if claim.run == self._run else None
        log.died(stuck=bool(exit_.stuck))
        if sent is None:
            self.handle(m.Lost(perf_counter(), lane.name))
        elif sent.chunk.kind == "collate":
            if self._jobs.lost(sent.chunk.order, exit_, claim, log):
                self.handle(m.Lost(perf_counter(), lane.name, sent.chunk.number))
            else:
                self.handle(m.Finished(perf_counter(), sent.chunk.number, 1, 0.0))
                self.handle(m.Lost(perf_counter(), lane.name))
        else:
            log.repeated += max(0, min(claim.started, sent.stop) - sent.done)
            settled, items = self.deaths.judge(exit_, claim, sent.chunk, sent.done, sent.stop, self.assembly)
            spans = cut(sent.chunk.spans, *settled)
            nbytes, failed = self.assembly.arrived(spans, items, 0) if items else (0, ())
            self.assembly.used(spans)
            offsets = tuple(settled[0] + at for at in failed)
            self.handle(m.Lost(perf_counter(), lane.name, sent.chunk.number, settled, offsets, nbytes))
        self.deaths.check_start(exit_, claim)
        stale = self._stale.laid_down_by(exit_.number)
        lane.replace(exit_.number, sorted({*self.assembly.settle_with(exit_.number), *stale}))
        log.workers["replaced"] += 1

    def told_of(self, claim: Claim, lane: str = m.CPU) -> str:
        """What a worker of the lane is at, in words."""
        sent = self._sent.get(claim.chunk) if claim.run == self._run else None
        stage = self.deaths.stage(claim)
        at = claim.started - 1
        if sent is None or sent.chunk.kind not in ("run", "inspect") or not 0 <= at < sent.chunk.size:
            return "a batch" if stage is None else f"stage {stage!r} of a batch"
        serial = cut(sent.chunk.spans, at, at + 1)[0][0]
        assembly = self.assembly
        place = sent.epoch, assembly.window.position(serial), assembly.window.key(serial)
        origin = Origin(*place, stage, lane, assembly.path(serial))
        return f"one sample ({origin})"

    def arrived(self, lane: Lane, count: int) -> None:
        """So many replacements have started."""
        self._slots[lane.name] += count
        self._open(lane, count)

    def _reported(self, lane: Lane, report: Report) -> None:
        if report.layout is not None:
            self.assembly.learn(report.layout)
            if report.chunk not in self._sent:  # its samples' marks came first
                return
        sent = self._sent[report.chunk]
        chunk = sent.chunk
        sent.done = report.done
        if report.final:
            del self._sent[report.chunk]
        spans = cut(chunk.spans, report.first, report.done)
        if report.done > report.first:
            position = self.assembly.window.position(spans[0][0]) if spans else -1
            prepared = chunk.kind in ("run", "next")
            going_on = sum(isinstance(item, Handed) for item in report.items or ()) if self._cuts else 0
            log = self.logs[sent.epoch]
            log.worked(lane.name, report, sent.epoch, position, sent.sent, prepared=prepared, handed=going_on)
            (self.shown or log).kept_busy(lane.name, report)
        if self.estimates is not None:
            observe(lane.kind, chunk, spans, report, self.estimates, self.assembly)
        if chunk.kind == "collate":
            assert report.items is not None
            self._jobs.joined(chunk.order, report.items[0])
            self.handle(m.Finished(perf_counter(), report.chunk, 1, report.seconds))
        elif chunk.kind == "inspect":
            assert report.items is not None and self.estimates is not None
            cpu, device, between = inspected(spans, report.items, self.estimates, self.assembly)
            self.handle(m.Inspected(perf_counter(), report.chunk, cpu, device, report.nbytes, between))
        elif report.status == "exhausted":
            self.assembly.forget(chunk.spans)
            if self.streams is not None:
                self.streams.exhausted(chunk.number, report.worker, report.told)
            self.handle(m.Exhausted(perf_counter(), report.chunk))
        else:
            if report.told is not None and self.streams is not None:
                self.streams.told[chunk.number] = report.told
            nbytes, failed = self.assembly.arrived(spans, report.items, report.nbytes)
            handed: tuple[tuple[int, int], ...] = ()
            now, held = perf_counter(), 0
            if self._cuts and report.items is not None:
                handed = tuple((report.first + at, stage) for at, stage in self.assembly.handed(spans, report.items))
                held = sum(item.nbytes for item in report.items if isinstance(item, Handed))
            else:
                self.assembly.used(spans)
            offsets = tuple(report.first + at for at in failed)
            self.handle(
                m.Finished(now, report.chunk, report.done, report.seconds, nbytes, report.final, offsets, handed, held)
            )

    def look(self) -> None:
        """Tell the scheduler how far the unfinished chunks have come."""
        self.ask()
        self.handle(m.Tick(perf_counter()))

    def ask(self) -> None:
        """Have lanes tell what is finished and what they are at, and take in what they answer at once."""
        self.at_work.clear()
        for lane in self.lanes.values():
            lane.look()
        self.receive()
        if self._awaits_answer:
            self._awaits_answer = False
            self.receive()

    def handle(self, event: m.Event) -> None:
        """Tell the scheduler, and do what it says."""
        instructions = self.scheduler.handle(event)
        if self.recorder is not None:
            self.recorder(event, instructions)
        for instruction in instructions:
            if isinstance(instruction, m.Dispatch):
                self._dispatch(instruction.chunk)
            elif isinstance(instruction, m.Compose):
                if self.assembly.compose(instruction):
                    self._jobs.need(instruction.order)
                    self.handle(m.CollateNeeded(perf_counter(), instruction.order))
            elif isinstance(instruction, m.HandOver):
                self.lanes[instruction.lane].hand_over(self._run, instruction.chunk, instruction.splits)
            else:
                self._awaits_answer = True
                self.lanes[instruction.lane].revoke(self._run, instruction.chunk, instruction.keep)

    def pad(self, order: int, number: int, epoch: int, ticket: Ticket) -> None:
        """Have batch ``order``, ``number`` in its epoch, which has lost all its samples, made anew of this one alone:
        see ``Assembly.pad``."""
        self.assembly.pad(order, number)
        piece = Piece(ticket.position, [ticket.index], [ticket.occurrence], -1, 0, 0, False)
        self._jobs.pad(order, Task(self._run, -1, "collate", epoch, self.seeds[epoch], (piece,)))
        self.handle(m.CollateNeeded(perf_counter(), order))

    def _dispatch(self, chunk: m.Chunk) -> None:
        now = perf_counter()
        lane = self.lanes[chunk.lane]
        if chunk.kind == "next":
            self._dispatch_next(chunk, now)
            return
        if chunk.kind == "collate":
            task = self._jobs.task(chunk, self._run, self.seeds, self.logs)
            self._sent[chunk.number] = Sent(chunk, task.epoch, now)
            self._jobs.send(lane, task, self.logs[task.epoch])
            return
        if self.assembly.unshippable and chunk.kind == "run":
            self.assembly.arrived(chunk.spans, [Unshippable()] * chunk.size, 0)
            self.assembly.used(chunk.spans)
            self.handle(m.Finished(now, chunk.number, chunk.size, 0.0))
            return
        epoch = self.assembly.window.at(chunk.spans[0][0]).epoch
        self._sent[chunk.number] = Sent(chunk, epoch, now)
        pieces = self.assembly.pieces(chunk.spans, inspect=chunk.kind == "inspect")
        layout = self.assembly.layout_bytes
        task = Task(self._run, chunk.number, chunk.kind, epoch, self.seeds[epoch], pieces, layout)
        lane.send(task._replace(stop=chunk.stop, singly=self.deaths.singly(chunk.spans), credit=chunk.credit))

    def _dispatch_next(self, chunk: m.Chunk, now: float) -> None:
        """A worker is to deliver the next batch of its own stream; the ticket is numbered by its turn."""
        epoch, seed = next(iter(self.seeds.items()))
        ticket, worker = chunk.spans[0][0], chunk.worker
        shared = None
        if self.streams is not None:
            self.streams.turns[ticket] = worker
            shared = self.streams.shared_seed if self._run > _FIRST else None
        self.assembly.admit(Record(epoch, ticket, range(ticket, ticket + 1), [None], None))
        self._sent[chunk.number] = Sent(chunk, epoch, now)
        start = self.stream_starts.pop(worker, None)
        task = Task(self._run, chunk.number, "next", epoch, seed, items=self._stream_batch, start=start)
        task = task._replace(shared_seed=shared)
        self.lanes[chunk.lane].send(task, worker)
