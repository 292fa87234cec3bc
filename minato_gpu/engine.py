"""The thin shell around the scheduler: lanes and their reports on one side, the consumer on the other.

Whoever holds the lock *pumps*: reads the lanes' reports, tells the scheduler, does what it says. While the consumer
is inside ``next`` it pumps by itself; while it trains, a thread does, and only when there is something to decide:
workers wake it through an event descriptor, and only while the board asks for attention. So a loop that fetches
batch after batch never fights a background thread for the interpreter lock.

Samplers are only ever advanced on the consumer's thread, because the window moves only when a batch is delivered.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Protocol

from minato_gpu.admission import Drawn, OrderLog, Source
from minato_gpu.assembly import Assembly, Batch, Record
from minato_gpu.lanes.base import Features, Report, Task
from minato_gpu.lanes.links import Links
from minato_gpu.memory.board import ATTENTION
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.dispatch import cut
from minato_gpu.scheduling.streams import StreamScheduler
from minato_gpu.telemetry import Telemetry, size_of


class AnyScheduler(Protocol):
    """What the engine needs of ``Scheduler`` and ``StreamScheduler``."""

    def handle(self, event: Any) -> list[Any]:
        """Take one event; return what to do now."""

    @property
    def pending(self) -> bool:
        """Whether something waits for a lane to become free."""

    def wake_at(self) -> float | None:
        """When to report unfinished chunks."""

    def stall_cause(self) -> str:
        """Why the consumer waits."""


class Estimates(Protocol):
    """Where predicted costs come from, and measured ones go (see costs.py of this package)."""

    def of_keys(self, keys: list[Any]) -> tuple[Any, Any]:
        """Predicted seconds per key on the CPU and on the device; None where nothing is known."""

    def of_features(
        self, serials: list[int], keys: list[Any], features: list[tuple[float, ...] | None]
    ) -> tuple[Any, Any]:
        """The same from cost features."""

    def took(self, samples: int, seconds: float) -> None:
        """So many samples took so long together."""

    def measured(self, lane: str, keys: list[Any], serials: list[int], seconds: list[float]) -> None:
        """What each sample really took, where that is known one by one."""

    def begin_epoch(self) -> None:
        """Start a new report of prediction errors."""

    def report(self) -> dict[str, Any]:
        """How good the predictions were."""


class EndOfEpoch(Exception):
    """The epoch has no further batch. Not StopIteration: a data set may raise that itself."""


class WorkerDied(RuntimeError):
    """A worker process ended while it was needed."""


class Sent:
    """A chunk on its way: what it holds, when it went, and for which epoch."""

    __slots__ = ("chunk", "done", "epoch", "sent")

    def __init__(self, chunk: m.Chunk, epoch: int, sent: float) -> None:
        self.chunk = chunk
        self.epoch = epoch
        self.sent = sent
        self.done = 0


class Epoch:
    """One pass over the sampler: its tickets so far, and where it ends in the order of delivery once that is known."""

    def __init__(self, source: Source, replay: Iterator[Drawn] | None, first_order: int, first_serial: int) -> None:
        self.source = source
        self.number = source.number
        self.first_order = first_order
        self.first_serial = first_serial
        self.end: int | None = None
        self._draw = source.draw if replay is None else lambda: next(replay, None)

    def draw(self) -> Drawn | None:
        """The next batch of tickets."""
        return self._draw()


class Engine:
    """One set of lanes, and the epochs that run through it.

    ``lanes``: by name, "cpu" first; ``make_scheduler``: a new scheduler for each run; ``window``: batches admitted
    and not delivered; ``place_size``: samples of a full batch, for lateness. ``streams``: every worker iterates the
    data set for itself (``stream_batch`` samples for a batch); an epoch ends when its streams do.
    """

    def __init__(
        self,
        links: Links,
        lanes: dict[str, Any],
        assembly: Assembly,
        make_scheduler: Callable[[], AnyScheduler],
        *,
        window: int,
        place_size: int,
        streams: bool = False,
        stream_batch: int = 1,
        estimates: Estimates | None = None,
        timeout: float = 0.0,
        order_log: OrderLog | None = None,
        recorder: Callable[[Any, list[Any]], None] | None = None,
    ) -> None:
        self._links = links
        self._lanes = lanes
        self.assembly = assembly
        self._make_scheduler = make_scheduler
        self._window = window
        self._place_size = place_size
        self._streams = streams
        self._stream_batch = stream_batch
        self.estimates = estimates
        self._timeout = timeout
        self._order_log = order_log
        self._recorder = recorder
        self._lock = threading.Lock()
        self._run = 0
        self._closed = False
        self.on_close: Callable[[], None] = lambda: None
        self.log = Telemetry(None, perf_counter())
        self._poll = select.poll()
        self._exit_fds: set[int] = set()
        for lane in lanes.values():
            receive, *exits = lane.fds()
            self._poll.register(receive, select.POLLIN)
            for fd in exits:
                self._poll.register(fd, select.POLLIN)
                self._exit_fds.add(fd)
        self._stale: list[tuple[set[tuple[int, int]], list[tuple[int, int]]]] = []
        self._start()
        self._thread = threading.Thread(target=self._attend, name="minato-pump", daemon=True)
        self._thread.start()

    # --- epochs --------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """A new run: forget every ticket. What workers are still at stays in its memory until they are through."""
        stale = {(self._run, number) for number in self._sent}
        for sent in self._sent.values():
            self._lanes[_lane_kind(sent.chunk)].revoke(self._run, sent.chunk.number, 0)
        for lane in self._lanes.values():
            stale.difference_update(lane.recall())
        self._stale.append((stale, self.assembly.clear()))
        self._run += 1
        self._sweep()
        self._start()

    def _start(self) -> None:
        self._sent: dict[int, Sent] = {}
        self._jobs: dict[int, tuple[list[Any], tuple[m.Span, ...]]] = {}
        self._epochs: dict[int, Epoch] = {}
        self._drawing: deque[Epoch] = deque()
        self._serial = self._place = self._order = 0
        self._scheduler = self._make_scheduler()

    def begin(self, source: Source, expected: int | None, *, prefetched: bool) -> None:
        """Start an epoch. ``prefetched``: ``prefetch`` was given this very source and it goes on from there."""
        with self._lock:
            self.log = Telemetry(expected, perf_counter())
            for lane in self._lanes.values():
                self.log.lanes[lane.name].slots = lane.slots
            if self.estimates is not None:
                self.estimates.begin_epoch()
            if prefetched:
                self._epochs = {source.number: self._epochs[source.number]}
            else:
                self._reset()
                self._queue(source)
                for lane in self._lanes.values():
                    self._handle(m.LaneOpened(perf_counter(), lane.name, lane.slots))
            self._refill()
            self._attention()

    def prefetch(self, source: Source) -> None:
        """Let the window run on into this epoch; the current one's sampler has ended (see ``drained``)."""
        with self._lock:
            self._queue(source)
            self._refill()
            self._attention()

    @property
    def drained(self) -> bool:
        """Whether every sampler has ended while the window has room."""
        return not self._drawing and self._place - self._order < self._window

    @property
    def delivered_all(self) -> bool:
        """Whether nothing but prefetched epochs is left to deliver."""
        return all(epoch.end == self._order for epoch in list(self._epochs.values())[:1])

    @property
    def closed(self) -> bool:
        """Whether the engine has ended."""
        return self._closed

    def _queue(self, source: Source) -> None:
        log = self._order_log
        replay = log.replay(source) if log is not None and log.replays else None
        epoch = Epoch(source, replay, self._place, self._serial)
        self._epochs[source.number] = epoch
        if not self._streams:
            self._drawing.append(epoch)

    def _refill(self) -> None:
        """Admit batches of the sampler until the window is full."""
        while self._drawing and self._place - self._order < self._window:
            epoch = self._drawing[0]
            drawn = epoch.draw()
            if drawn is None:
                self._drawing.popleft()
                epoch.end = self._place
                self._handle(m.Ended(perf_counter(), epoch.number))
                continue
            size = len(drawn.keys)
            self.assembly.admit(Record(epoch.number, self._serial, drawn.positions, drawn.keys, drawn.occurrences))
            cpu, device = (None, None) if self.estimates is None else self.estimates.of_keys(drawn.keys)
            event = m.Admitted(perf_counter(), self._place, epoch.number, self._serial, size, cpu, device)
            self._serial += size
            self._place += 1
            self._handle(event)

    # --- the consumer's side -------------------------------------------------------------------------------

    def next(self, number: int) -> Any:
        """The epoch's next batch. Raises EndOfEpoch at its end, and whatever preparing the batch raised."""
        started = perf_counter()
        with self._lock:
            if self._closed:
                raise EndOfEpoch
            epoch = self._epochs[number]
            self._links.board.words[ATTENTION] = 0
            self.assembly.reclaim()
            self._refill()
            self._pump()
            if not self.assembly.ready(self._order) and epoch.end != self._order:
                self._await(epoch, started)
            if epoch.end == self._order:
                self.log.end = perf_counter()
                self._attention()
                raise EndOfEpoch
            order, batch = self._order, self.assembly.take(self._order)
            self._order += 1
            now = perf_counter()
            self._handle(m.Delivered(now, order))
            self._refill()
            self._attention()
        value = self.assembly.value(batch) if batch.failure is None else None
        self._log_delivery(epoch, order, batch, now, now - started, value)
        return value if batch.failure is None else self.assembly.value(batch)

    def _await(self, epoch: Epoch, started: float) -> None:
        """Pump until the next batch is ready, or the epoch turns out to be over."""
        asked = perf_counter()
        self._handle(m.Asked(asked))
        cause = self._scheduler.stall_cause()
        while not self.assembly.ready(self._order) and epoch.end != self._order:
            self._sleep(started)
            self._pump()
        self.log.stalled(cause, perf_counter() - asked)

    def _sleep(self, started: float) -> None:
        """Until a report arrives, a worker ends, or the scheduler wants to look at what runs."""
        now = perf_counter()
        wake = self._scheduler.wake_at()
        end = started + self._timeout if self._timeout > 0 else None
        if end is not None and now >= end:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        until = min((t for t in (wake, end) if t is not None), default=None)
        ready = self._poll.poll(None if until is None else max(0.0, 1e3 * (until - now)))
        if any(fd in self._exit_fds for fd, _ in ready):
            self._pump()
            self._check_workers()
        if wake is not None and perf_counter() >= wake:
            self._look()

    def _check_workers(self) -> None:
        """A worker that ended while the loader runs is an error, as it is PyTorch's."""
        for lane in self._lanes.values():
            for exit_ in lane.exits():
                raise WorkerDied(exit_.message())

    def _log_delivery(self, epoch: Epoch, order: int, batch: Batch, now: float, wait: float, value: Any) -> None:
        first, number = epoch.first_serial, order - epoch.first_order
        if batch.failure is not None:
            failed = max(1, batch.failed)
            self.log.failed += failed
            self.log.skipped += batch.size - failed
            return
        late = [max(0, number - (hi - 1 - first) // self._place_size) for _, hi in batch.spans]
        late += [max(0, number - (lo - first) // self._place_size) for lo, _ in batch.spans]
        if self._order_log is not None and not self._order_log.replays:
            self._order_log.record(epoch.number, [(lo - first, hi - first) for lo, hi in batch.spans])
        size = size_of(value) if self._streams else batch.size
        self.log.delivered(now, epoch.number, number, size, wait, late)

    # --- pumping (with the lock held) ----------------------------------------------------------------------

    def _attend(self) -> None:
        """The pump thread: serves while the consumer is away and the board asks for attention."""
        while True:
            os.eventfd_read(self._links.wake)
            with self._lock:
                if self._closed:
                    return
                if self._links.board.words[ATTENTION]:
                    self._pump()
                    self._attention()

    def _attention(self) -> None:
        """Ask workers to wake the pump thread if their reports will need an answer before the consumer is back."""
        words = self._links.board.words
        wanted = self._scheduler.pending or (self.assembly.needs_jobs and bool(self._sent))
        if not wanted:
            words[ATTENTION] = 0
        elif not words[ATTENTION]:
            words[ATTENTION] = 1
            self._links.board.fence()
            self._pump()  # what was reported before workers could see the flag

    def _pump(self) -> None:
        for lane in self._lanes.values():
            for report in lane.receive():
                if report.run == self._run:
                    self._reported(lane, report)
                else:
                    self._drop(report)
        if isinstance(self._scheduler, StreamScheduler) and self._epochs:
            next(iter(self._epochs.values())).end = self._scheduler.end

    def _drop(self, report: Report) -> None:
        """A report of an earlier run: free what it brings, and what that run held once its last chunk is through."""
        for item in report.items or ():
            self.assembly.release(item.fields if isinstance(item, Features) else item)
        for chunks, _ in self._stale:
            if report.final:
                chunks.discard((report.run, report.chunk))
        self._sweep()

    def _sweep(self) -> None:
        for _, blocks in (entry for entry in self._stale if not entry[0]):
            self.assembly.free(blocks)
        self._stale = [entry for entry in self._stale if entry[0]]

    def _reported(self, lane: Any, report: Report) -> None:
        sent = self._sent[report.chunk]
        chunk = sent.chunk
        sent.done = report.done
        if report.layout is not None:
            self.assembly.learn(report.layout)
        if report.final:
            del self._sent[report.chunk]
        spans = cut(chunk.spans, report.first, report.done)
        if report.done > report.first:
            position = self.assembly.position(spans[0][0]) if spans else -1
            prepared = chunk.kind in ("run", "next")
            self.log.worked(lane.name, report, sent.epoch, position, sent.sent, prepared=prepared)
        self._measured(lane.name, chunk, spans, report)
        if chunk.kind == "collate":
            assert report.items is not None
            self.assembly.joined(chunk.order, report.items[0])
            self._handle(m.Finished(perf_counter(), report.chunk, 1, report.seconds))
        elif chunk.kind == "inspect":
            self._inspected(report, spans)
        elif report.status == "exhausted":
            self.assembly.forget(chunk.spans)
            self._handle(m.Exhausted(perf_counter(), report.chunk))
        else:
            nbytes, failed = self.assembly.arrived(spans, report.items, report.nbytes)
            self.assembly.used(spans)
            offsets = tuple(report.first + at for at in failed)
            now = perf_counter()
            self._handle(m.Finished(now, report.chunk, report.done, report.seconds, nbytes, report.final, offsets))

    def _inspected(self, report: Report, spans: tuple[m.Span, ...]) -> None:
        """Host reads are done: their fields lie ready, and their features give the costs."""
        assert report.items is not None and self.estimates is not None
        features: list[tuple[float, ...] | None] = []
        serials = [serial for lo, hi in spans for serial in range(lo, hi)]
        keys = [self.assembly.key(serial) for serial in serials]
        for serial, item in zip(serials, report.items, strict=True):
            good = isinstance(item, Features)
            self.assembly.inspected(serial, item.fields if good else item)
            features.append(item.values if good else None)
        cpu, device = self.estimates.of_features(serials, keys, features)
        self._handle(m.Inspected(perf_counter(), report.chunk, cpu, device, report.nbytes))

    def _measured(self, lane: str, chunk: m.Chunk, spans: tuple[m.Span, ...], report: Report) -> None:
        if self.estimates is None or chunk.kind != "run" or report.done == report.first:
            return
        self.estimates.took(report.done - report.first, report.seconds)
        if report.times is not None:
            serials = [serial for lo, hi in spans for serial in range(lo, hi)]
            keys = [self.assembly.key(serial) for serial in serials]
            self.estimates.measured(lane, keys, serials, report.times)

    def _look(self) -> None:
        """Tell the scheduler how far the unfinished chunks have come."""
        now = perf_counter()
        for sent in list(self._sent.values()):
            if sent.chunk.kind == "run" and sent.chunk.size > 1:
                since = self._lanes[_lane_kind(sent.chunk)].running_s(self._run, sent.chunk.number)
                if since is not None:
                    self._handle(m.Running(now, sent.chunk.number, sent.done, since))
        self._handle(m.Tick(now))

    def _handle(self, event: m.Event) -> None:
        instructions = self._scheduler.handle(event)
        if self._recorder is not None:
            self._recorder(event, instructions)
        for instruction in instructions:
            if isinstance(instruction, m.Dispatch):
                self._dispatch(instruction.chunk)
            elif isinstance(instruction, m.Compose):
                job = self.assembly.compose(instruction)
                if job is not None:
                    self._jobs[instruction.order] = job, instruction.spans
                    self._handle(m.CollateNeeded(perf_counter(), instruction.order))
            else:
                kept = self._lanes[instruction.lane].revoke(self._run, instruction.chunk, instruction.keep)
                if kept is not None:
                    self._handle(m.Revoked(perf_counter(), instruction.chunk, kept))

    def _dispatch(self, chunk: m.Chunk) -> None:
        now = perf_counter()
        lane = self._lanes[_lane_kind(chunk)]
        if chunk.kind == "next":
            self._dispatch_next(chunk, now)
            return
        if chunk.kind == "collate":
            items, spans = self._jobs.pop(chunk.order)
            number = self.assembly.record(spans[0][0]).epoch
            self._sent[chunk.number] = Sent(chunk, number, now)
            lane.send(Task(self._run, chunk.number, "collate", number, 0, self.assembly.described(spans), None, items))
            return
        epoch = self._epochs[self.assembly.record(chunk.spans[0][0]).epoch]
        self._sent[chunk.number] = Sent(chunk, epoch.number, now)
        pieces = self.assembly.pieces(chunk.spans, inspect=chunk.kind == "inspect")
        layout = self.assembly.layout_bytes
        lane.send(Task(self._run, chunk.number, chunk.kind, epoch.number, epoch.source.seed, pieces, layout))

    def _dispatch_next(self, chunk: m.Chunk, now: float) -> None:
        """A worker is to deliver the next batch of its own stream; the ticket is numbered by its turn."""
        epoch = next(iter(self._epochs.values()))
        ticket = chunk.spans[0][0]
        self.assembly.admit(Record(epoch.number, ticket, range(ticket, ticket + 1), [None], None))
        self._sent[chunk.number] = Sent(chunk, epoch.number, now)
        task = Task(self._run, chunk.number, "next", epoch.number, epoch.source.seed, items=self._stream_batch)
        self._lanes[m.CPU].send(task, int(chunk.lane.partition(":")[2]))

    # --- the end -------------------------------------------------------------------------------------------

    def close(self, timeout: float = 2.0) -> None:
        """End lanes and thread; batches that the consumer holds live on. Idempotent, callable from anywhere."""
        if threading.current_thread() is self._thread:  # the garbage collector ran there, perhaps under the lock
            threading.Thread(target=self.close, name="minato-close").start()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for sent in self._sent.values():
                self._lanes[_lane_kind(sent.chunk)].revoke(self._run, sent.chunk.number, 0)
        os.eventfd_write(self._links.wake, 1)
        self._thread.join()
        self.on_close()
        ended = [lane.close(timeout) for lane in self._lanes.values()]
        if all(ended):
            self.assembly.clear()
            self._links.close()


def _lane_kind(chunk: m.Chunk) -> str:
    """ "cpu:3" is a worker of lane "cpu"."""
    return chunk.lane.split(":")[0] if chunk.lane.startswith(m.CPU) else chunk.lane
