"""One life of a scheduler: its instructions become tasks, and lanes' reports become its events.

A run ends when its last epoch has been delivered, or when the consumer leaves one in the middle. Then a new one begins,
and the memory of what lanes are still at is kept until they have ended that (pump.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from time import perf_counter
from typing import cast

from minato_gpu.engine.jobs import Jobs
from minato_gpu.engine.parts import Parts
from minato_gpu.estimates.observations import inspected, observe
from minato_gpu.lanes.base import Failure, Handed, Item, Report, Task, Yielded
from minato_gpu.lanes.contract import AtWork, Exit, Lane
from minato_gpu.lanes.streams import StreamState
from minato_gpu.memory.status_board import Claim
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.observe.waits import Arrival
from minato_gpu.samples import Position, TicketId
from minato_gpu.sampling.worker_streams import WorkerStreams
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.flights import Flight
from minato_gpu.scheduling.scheduler import Scheduler
from minato_gpu.scheduling.spans import TicketSpan, count, cut, number_at, serials, shifted, tickets
from minato_gpu.window.records import Record

_FIRST = 1  # the first run: workers have a data pipe's seed from the data set that they were started with


class Run:
    """One run of the scheduler."""

    def __init__(self, number: int, parts: Parts) -> None:
        self.number = number  # 0: none, only there until the first begins
        self.scheduler = Scheduler(parts.settings.policy)
        self.seeds: dict[int, int] = {}  # base seeds by epoch, for all epochs that have tickets here
        self.logs: dict[int, Telemetry] = {}  # likewise
        self.streams: WorkerStreams | None = None  # positions of workers' own streams, in the epoch that is delivered
        self.stream_starts: dict[int, StreamState] = {}  # start of the worker's stream, by worker
        self.typical_s = 0.0  # what one of the samples that were reported last took on a core; 0.0 if next to nothing
        self.arrivals: deque[Arrival] | None = None  # arrivals of samples, recorded while the consumer waits; else None
        self.awaits_answer = False  # something was revoked
        # by lane and worker: its last chunk that has ended, where chunks have a credit
        self._ended: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._lanes, self._assembly = parts.lanes, parts.assembly
        self._estimates, self._deaths = parts.estimates, parts.deaths
        self._reads = parts.reads
        self._parts, self._settings = parts, parts.settings
        self._jobs = Jobs(parts.assembly, parts.deaths)

    def add_epoch(self, number: int, seed: int) -> None:
        """Notes that tickets of this epoch will come."""
        self.seeds[number] = seed
        log = self.logs[number] = Telemetry(perf_counter(), number, self._parts.facts)
        for lane in self._lanes.values():
            log.lanes[lane.name].slots = lane.slots

    @property
    def sent(self) -> list[Flight]:
        """The chunks that were sent to lanes and have not ended."""
        return [flight for flight in self.scheduler.flights.values() if flight.task is not None]

    def revoke_all(self) -> None:
        """Keeps workers from starting another sample of what they were sent. Jobs are joined to their end."""
        for chunk in (flight.chunk for flight in self.sent):
            if chunk.kind != "collate":
                self._lanes[chunk.lane].revoke(self.number, chunk.number, 0)

    # --- what the scheduler says ----------------------------------------------------------------------------

    def handle(self, event: m.Event) -> None:
        """Tells the scheduler of an event, and does what it says."""
        for instruction in self.scheduler.handle(event):
            if isinstance(instruction, m.Dispatch):
                self._dispatch(instruction.chunk)
            elif isinstance(instruction, m.Compose):
                if self._assembly.compose(instruction):
                    self.handle(m.CollateNeeded(perf_counter(), instruction.order))
            elif isinstance(instruction, m.HandOver):
                self._lanes[instruction.lane].hand_over(self.number, instruction.chunk, instruction.splits)
            else:
                self.awaits_answer = True
                self._lanes[instruction.lane].revoke(self.number, instruction.chunk, instruction.keep)

    def _dispatch(self, chunk: m.Chunk) -> None:
        now, assembly = perf_counter(), self._assembly
        lane = self._lanes[chunk.lane]
        if chunk.kind == "next":
            self._admit(chunk)
        if chunk.kind == "collate":
            self._dispatch_job(lane, chunk)
            return
        if assembly.samples.stored_nowhere and chunk.kind == "run":
            self._jobs.leave(chunk.spans)
            assembly.samples.arrived(chunk.spans, None)
            self._release(chunk.spans)
            self.handle(m.Finished(now, chunk.number, chunk.size, 0.0))
            return
        epoch = assembly.window.at(chunk.spans[0][0]).epoch
        pieces = assembly.pieces(chunk.spans, inspect=chunk.kind == "inspect")
        if self._reads is not None:
            pieces = self._reads.put_at_hand(pieces, assembly.window.parts(chunk.spans))
        layout = assembly.samples.layout_bytes
        task = Task(self.number, chunk.number, chunk.kind, epoch, self.seeds[epoch], pieces, layout)
        self.scheduler.flights[chunk.number].task = task
        if chunk.kind == "next":
            # a worker's first task brings the start of its stream
            start = self.stream_starts.pop(chunk.worker, None)
            shared = self.streams.shared_seed if self.streams is not None and self.number > _FIRST else None
            task = task._replace(start=start, shared_seed=shared)
            lane.send(task, chunk.worker)
            return
        ended = self._ended[lane.name].copy() if chunk.credit else None
        singly = self._deaths.singly(chunk.spans)
        lane.send(task._replace(stop=chunk.stop, singly=singly, credit=chunk.credit, ended=ended))

    def _dispatch_job(self, lane: Lane, chunk: m.Chunk) -> None:
        """Sends a worker the job of joining a batch, and of preparing what is missing of it."""
        task = self._jobs.task(chunk, self.number, self.seeds)
        (piece,) = task.pieces
        piece = piece._replace(marks=self._parts.links.completions.reserve(len(piece.keys)))
        self.scheduler.flights[chunk.number].task = self._jobs.send(lane, task._replace(pieces=(piece,)))

    def _admit(self, chunk: m.Chunk) -> None:
        """Makes a place of tickets without keys, for batches that the scheduler asks for from a worker's own stream."""
        lo, hi = chunk.spans[0]
        positions = cast("Sequence[Position]", range(lo, hi))
        self._assembly.admit(Record(next(iter(self.seeds)), lo, positions, [None] * (hi - lo), None))
        if self.streams is not None:
            self.streams.turns.update(dict.fromkeys(serials(lo, hi), chunk.worker))

    # --- what lanes report ----------------------------------------------------------------------------------

    def reported(self, lane: Lane, report: Report, shown: Telemetry) -> None:
        """Takes in a lane's report on a chunk. ``shown`` is the log of the epoch that is delivered."""
        if report.layout is not None:
            self._assembly.samples.learn(report.layout)
        flight = self.scheduler.flights[report.chunk]
        chunk = flight.chunk
        if report.final and chunk.credit:
            self._ended[lane.name][report.worker] = report.chunk
        spans = cut(chunk.spans, report.first, report.done)
        if chunk.kind == "next" and spans:
            report, spans = self._advance(report, chunk.worker, spans[0])
        if report.done > report.first:
            by_job = 0  # samples that a job has prepared first
            if chunk.kind == "collate":
                assert report.items is not None
                by_job = self._jobs.joined(chunk.order, report.items, report.prepared, self.logs[flight.task.epoch])
            self._log(lane, flight, spans, report, shown, by_job)
        if self._estimates is not None:
            copies = set[TicketId]() if self._reads is None else self._reads.copies
            observe(lane, chunk, spans, report, self._estimates, self._assembly, copies)
        if chunk.kind == "run":
            self._finished(report, spans)
        elif chunk.kind == "next":
            self._finished(report, spans, report.done - report.first - count(spans))
        elif not report.done:
            self._end(flight, 0)
        elif chunk.kind == "collate":
            self._end(flight, 1, report.seconds)
        else:
            assert report.items is not None
            cpu, device, between = inspected(spans, report.items, self._estimates, self._assembly)
            self._release(spans)
            nbytes = sum(item.nbytes for item in report.items if item is not None)
            self.handle(m.Inspected(perf_counter(), report.chunk, cpu, device, nbytes, between))

    def recalled(self, chunk: int) -> None:
        """Takes back a chunk of which the lane has done no more than it has reported."""
        if (flight := self.scheduler.flights.get(chunk)) is not None:
            self._end(flight, flight.done)

    def _end(self, flight: Flight, done: int, seconds: float = 0.0) -> None:
        """Notes that the lane has ended the chunk."""
        self._free_marks(flight)
        self.handle(m.Finished(perf_counter(), flight.chunk.number, done, seconds))

    def _log(
        self,
        lane: Lane,
        flight: Flight,
        spans: tuple[TicketSpan, ...],
        report: Report,
        shown: Telemetry,
        by_job: int,
    ) -> None:
        if self._settings.items:
            self.typical_s = 0.0 if report.times is None else sorted(report.times)[len(report.times) // 2]
        positions = shifted(spans, self._assembly.window.position(spans[0][0]) - spans[0][0]) if spans else []
        prepared = flight.chunk.kind in ("run", "next") or by_job > 0
        if spans and prepared and self.arrivals is not None:
            self.arrivals.append((lane.name, report.worker, spans))
        going_on = sum(isinstance(item, Handed) for item in report.items or ()) if self._settings.cuts else 0
        log, stream, failed = self.logs[flight.task.epoch], flight.chunk.kind == "next", 0
        samples = report.done - report.first
        if report.items is not None and Failure in map(type, report.items):
            failed = _failed(report, stream=stream)
        if flight.chunk.kind == "collate":
            samples, failed = max(1, by_job), min(failed, by_job)
        if stream and self.streams is not None:
            samples = sum(self.streams.size_of(ticket, self._settings.batch) for ticket in tickets(spans))
        log.worked(
            lane.name, report, samples, positions, flight.sent, prepared=prepared, handed=going_on, failed=failed
        )
        shown.kept_busy(lane.name, report)

    def _finished(self, report: Report, spans: tuple[TicketSpan, ...], ended: int = 0) -> None:
        """Takes in samples that are ready, have failed, or are handed over to another lane. ``ended``: how many tickets
        of a worker's own stream, the last ones, are empty, as the stream has come to its end."""
        found = self._assembly.samples.arrived(spans, report.items)
        self._release(spans)
        failed = tuple(report.first + at for at in found.failed)
        handed = tuple((report.first + at, stage) for at, stage in found.handed)
        now, what = perf_counter(), (report.chunk, report.done, report.seconds, found.nbytes, report.final)
        self.handle(m.Finished(now, *what, failed, handed, found.held, ended, report.own_s))

    def _release(self, spans: tuple[TicketSpan, ...]) -> None:
        """Releases what was read ahead for these samples."""
        if self._reads is not None:
            self._reads.release(spans)

    def _advance(self, report: Report, worker: int, span: TicketSpan) -> tuple[Report, tuple[TicketSpan, ...]]:
        """Takes in how far a worker has come in its own stream.

        Returns the report on its batches alone, and their tickets.
        """
        lo, hi, items = *span, list[Item]()
        for ticket, item in zip(serials(lo, hi), report.items or (), strict=True):
            state = item.state if isinstance(item, Yielded) else None
            item = item.item if isinstance(item, Yielded) else item
            if self.streams is not None:
                self.streams.advance(ticket, worker, state, item)
            if item is not None:
                items.append(item)
        end = TicketId(lo + len(items))
        self._assembly.taken(((end, hi),))
        return report._replace(items=items), (((lo, end),) if items else ())

    def progress(self, each: AtWork, now: float) -> None:
        """Tells the scheduler how far a worker has come in a chunk."""
        flight = self.scheduler.flights.get(each.claim.chunk)
        if flight is not None and flight.chunk.kind in ("run", "next") and (flight.size > 1 or self._settings.cuts):
            done = max(0, each.claim.started - 1)
            self.handle(m.Running(now, flight.chunk.number, done, now - each.since))

    # --- workers that have died ----------------------------------------------------------------------------

    def lost(self, lane: Lane, exit_: Exit, log: Telemetry) -> None:
        """Handles a worker of the lane that has ended, after all its reports. Others do what else it had taken.

        Raises WorkerDied if others would die as well (see ``Deaths.judge``).
        """
        claim = exit_.claim
        flight = self.scheduler.flights.get(claim.chunk) if claim.run == self.number else None
        if flight is None:
            self.handle(m.Lost(perf_counter(), lane.name))
            return
        chunk = flight.chunk
        if chunk.kind == "collate":
            if self._jobs.lost(chunk, flight.task.pieces[0], exit_, log):
                self._free_marks(flight)
                self.handle(m.Lost(perf_counter(), lane.name, chunk.number))
            else:
                self._end(flight, 1)
                self.handle(m.Lost(perf_counter(), lane.name))
        else:
            log.repeated += max(0, min(claim.started, flight.size) - flight.done)
            what = chunk.lane, chunk.spans, flight.done, flight.size
            settled, items = self._deaths.judge(exit_, *what, self._assembly)
            spans = cut(chunk.spans, *settled)
            found = self._assembly.samples.arrived(spans, items)
            self._release(spans)
            offsets = tuple(settled[0] + at for at in found.failed)
            self.handle(m.Lost(perf_counter(), lane.name, chunk.number, settled, offsets, found.nbytes))

    def _free_marks(self, flight: Flight) -> None:
        """Frees the marks of a job that nobody is at any more; other chunks have none of their own."""
        if flight.chunk.kind == "collate":
            self._parts.links.completions.give_back(flight.task.pieces[0].marks)

    def in_words(self, claim: Claim, lane: str) -> str:
        """Returns in words what a worker of the lane is at."""
        flight = self.scheduler.flights.get(claim.chunk) if claim.run == self.number else None
        stage = self._deaths.stage(claim)
        at = claim.started - 1
        if flight is None or flight.chunk.kind not in ("run", "inspect") or not 0 <= at < flight.size:
            return "a batch" if stage is None else f"stage {stage!r} of a batch"
        return f"one sample ({self._assembly.samples.origin(number_at(flight.chunk.spans, at), stage, lane)})"


def _failed(report: Report, *, stream: bool) -> int:
    """Returns how many samples of a report failed.

    Samples of a batch that could not be joined were prepared. Of a stream's batch nobody knows which sample failed: it
    counts as one.
    """
    return sum(isinstance(item, Failure) and (stream or not item.collated) for item in report.items or ())
