"""The engine: epochs through one set of lanes, for a consumer that waits or trains.

Whoever holds the lock *pumps*: reads the lanes' reports, tells the scheduler, does what it says. A consumer that
waits for its batch, or fetches batch after batch, pumps by itself. While it trains, a thread does: woken by workers
through an event descriptor where their reports need an answer (the board asks for attention only then), and by the
consumer when it leaves with a batch that lay ready. What follows from a delivery is then off the training loop's way,
and a loop that only fetches never fights a background thread for the interpreter lock.

Samplers are only ever advanced on the consumer's thread, because the window moves only when a batch is delivered. What
one raises then has nothing to do with that batch: the consumer gets it, and the error when it asks again.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

from minato_gpu.admission import OrderLog
from minato_gpu.lanes.base import Failure
from minato_gpu.lanes.links import Links
from minato_gpu.lanes.processes import Exit, WorkerDied
from minato_gpu.later import Later
from minato_gpu.memory.board import ATTENTION, SAVES
from minato_gpu.notices import LOGGER
from minato_gpu.pump import Pump
from minato_gpu.records import Batch, Record
from minato_gpu.samples import Ticket
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.streams import StreamScheduler
from minato_gpu.sources import Drawn, Source
from minato_gpu.telemetry import Telemetry, size_of
from minato_gpu.threads import OwnThread
from minato_gpu.watchdog import Watchdog, WorkerHung

_LONGEST_SLEEP_S = 1.0  # Python sees a signal that came just before poll() only when poll() returns
_TRAINS_S = 500e-6  # a consumer that is away for longer does something with its batches


Judge = Callable[[list[Failure], int], None]
"""Told of the samples that a batch is to come without, and how many others it has; raises where it must not."""

NOTHING = object()
"""What ``Engine.next`` returns for a batch of which every sample was left out."""


class EndOfEpoch(Exception):
    """The epoch has no further batch. Not StopIteration: a data set may raise that itself."""


class Epoch:
    """One pass over the sampler: its tickets so far, and where it ends in the order of delivery once that is known."""

    def __init__(self, source: Source, replay: Iterator[Drawn] | None, first_order: int, first_serial: int) -> None:
        """``first_order`` and ``first_serial``: of its first position, whether this run delivers that or not."""
        self.source = source
        self.number = source.number
        self.first_order = first_order
        self.first_serial = first_serial
        self.end: int | None = None
        self._draw = source.draw if replay is None else lambda: next(replay, None)

    def draw(self) -> Drawn | None:
        """The next batch of tickets."""
        return self._draw()


def _refused(batch: Batch, judge: Judge | None) -> BaseException | None:
    """What is raised where the batch must not come without its bad samples."""
    if batch.bad and judge is not None:
        try:
            judge(batch.bad, batch.size)
        except BaseException as error:
            return error
    return None


class Engine:
    """One set of lanes, and the epochs that run through it.

    ``window``: batches admitted and not delivered; ``place_size``: samples of a full batch, for lateness; ``streams``:
    every worker iterates the data set for itself, and an epoch ends when its streams do; ``replaces``: a worker that
    dies is replaced; ``watchdog``: notices those, and a device lane, that hang.
    """

    def __init__(
        self,
        links: Links,
        pump: Pump,
        *,
        window: int,
        place_size: int,
        streams: bool = False,
        timeout: float = 0.0,
        order_log: OrderLog | None = None,
        replaces: bool = False,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._links = links
        self.pump = pump
        self.assembly = pump.assembly
        self._window = window
        self._devices = 1 if self.assembly.loading is None else len(self.assembly.loading.transfers)
        self._place_size = place_size
        self._streams = streams
        self._timeout = timeout
        self._order_log = order_log
        self._replaces = replaces and not streams and pump.lanes[m.CPU].can_kill
        self._watchdog = watchdog
        self._broken: BaseException | None = None  # what the pump thread has found; raised when the consumer must wait
        self._lock = threading.Lock()
        self._closed = False
        self.on_close: Callable[[], None] = lambda: None
        self._poll = select.poll()
        self._exit_fds: set[int] = set()
        for lane in pump.lanes.values():
            receive, *exits = lane.fds()
            self._poll.register(receive, select.POLLIN)
            for fd in exits:
                self._poll.register(fd, select.POLLIN)
                self._exit_fds.add(fd)
        if self.assembly.loading is not None:
            for fd in self.assembly.loading.fds():
                self._poll.register(fd, select.POLLIN)
        self.log = Telemetry(None, perf_counter())
        self._left = 0.0  # when the consumer was handed its last batch
        self.handed: list[m.Span] | None = None  # the positions (in a stream: the ticket) of that, or of what it raised
        self.bad: list[Failure] = []  # the samples that were left out of it
        self.survivor: Ticket | None = None  # the last that was not, where some may be
        self._beyond = 0  # batches that the window is longer by, to find a sample that has not failed
        self._forget()
        self._thread = OwnThread(target=self._attend, name="minato-pump", daemon=True)
        self._thread.start()

    # --- epochs --------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._epochs: dict[int, Epoch] = {}
        self._drawing: deque[Epoch] = deque()
        self._due: deque[Callable[[], None]] = deque()  # what the scheduler has not been told yet
        self._raised = Later()  # what a sampler raised while a batch lay at hand
        self._serial = self._place = self._order = 0

    def begin(self, source: Source, expected: int | None, *, prefetched: bool) -> None:
        """Start an epoch. ``prefetched``: ``prefetch`` was given this very source and it goes on from there."""
        with self._lock:
            pump = self.pump
            if pump.estimates is not None:
                pump.estimates.begin_epoch()
            if prefetched:
                self._epochs = {source.number: self._epochs[source.number]}
            else:
                pump.new_run()
                self._forget()
                self._resume(source)
                self._queue(source)
                self.assembly.expect(self._order)
            self.log = pump.logs[source.number]
            self.log.expected, self.log.begin = expected, perf_counter()
            if not prefetched:
                pump.open_lanes()
            self._draw()
            self._settle()
            self._attention()

    def prefetch(self, source: Source) -> None:
        """Let the window run on into this epoch; the current one's sampler has ended (see ``drained``).

        Raises what its sampler does; it is then not drawn from again until it begins.
        """
        with self._lock:
            self._queue(source)
            try:
                self._draw()
            except BaseException:
                self._drawing.clear()
                raise
        self._leave_due()

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
        resumed = source.delivered.batches > 0 or (source.streams is not None and source.streams.batches > 0)
        epoch = Epoch(source, replay, 0 if resumed else self._place, 0 if resumed else self._serial)
        self._epochs[source.number] = epoch
        self.pump.add_epoch(source.number, source.seed)
        if not self._streams:
            self._drawing.append(epoch)

    def _resume(self, source: Source) -> None:
        """An earlier run has delivered some of the epoch: number places, batches and serials on from there."""
        self.pump.streams, self.pump.stream_starts = source.streams, dict(enumerate(source.starts))
        if source.streams is not None:
            source.streams.on_saves = self._on_saves
            self._on_saves(True)
        if source.streams is not None and source.streams.batches:
            self._order = source.streams.batches
            turn, ended = source.streams.turn, tuple(source.streams.ended)
            self._tell(m.Resumed, self._order, turn=turn, ended=ended)
        elif source.delivered.batches:
            self._place, self._serial, self._order = source.place, source.position, source.delivered.batches
            self._tell(m.Resumed, self._order)

    def _on_saves(self, come: bool) -> None:
        if not self._closed:
            self._links.board.words[SAVES] = come

    def _draw_on(self) -> None:
        """Draw on while a batch is at hand: what a sampler raises is kept for when the consumer asks for more.

        An interrupt passes through: it is not the sampler's, and the consumer wants it now.
        """
        try:
            self._draw()
        except Exception as error:
            self._raised.keep(error)

    def _draw(self) -> None:
        """Draw batches of the sampler until the window is full."""
        while self._drawing and self._place - self._order < self._window + self._beyond:
            epoch = self._drawing[0]
            drawn = epoch.draw()
            if drawn is None:
                self._drawing.popleft()
                epoch.end = self._place
                self._due.append(partial(self._tell, m.Ended, epoch.number))
                continue
            begins = epoch.first_order
            record = Record(epoch.number, self._serial, drawn.positions, drawn.keys, drawn.occurrences, begins)
            self._serial += record.rows
            if drawn.left is None:
                batch = None if self._place >= self._order else 0
                self._due.append(partial(self._admit, self._place, record, batch))
            else:
                self._admit_left(record, drawn.left)
            self._place += 1

    def _admit_left(self, record: Record, left: tuple[m.Span, ...]) -> None:
        """An earlier run delivered the rest of this place: what is left enters in pieces, each a record of its own."""
        batch = record.rows if self._place >= self._order else 0
        if not left:
            what = self._place, record.epoch, record.first, 0
            self._due.append(partial(self._tell, m.Admitted, *what, batch=batch, home=self._home(self._place, record)))
        for lo, hi in left:
            piece = record.part(lo, hi)
            self._due.append(partial(self._admit, self._place, piece, batch))
            batch = 0

    def _admit(self, place: int, record: Record, batch: int | None = None) -> None:
        estimates = self.pump.estimates
        self.assembly.admit(record)
        cpu, device = (None, None) if estimates is None else estimates.of_keys(record.keys)
        what = place, record.epoch, record.first, record.rows, cpu, device
        self._tell(m.Admitted, *what, batch=batch, home=self._home(place, record))

    def _home(self, place: int, record: Record) -> int:
        """The number of the device that gets the batch of this number."""
        return (place - record.begins) % self._devices

    def _tell(self, event: Callable[..., m.Event], *what: Any, **more: Any) -> None:
        self.pump.handle(event(perf_counter(), *what, **more))

    # --- the consumer's side -------------------------------------------------------------------------------

    def next(self, number: int, judge: Judge | None = None) -> Any:
        """The epoch's next batch. Raises EndOfEpoch at its end, whatever preparing the batch raised, and what a sampler
        raised when it was drawn from last.

        ``judge`` is asked about samples that are to be left out, and raises where they must not be.
        """
        started = perf_counter()
        self.handed = None
        with self._lock:
            if self._closed:
                raise EndOfEpoch
            self._raised.raise_kept()
            epoch = self._epochs[number]
            at_hand = self._at_hand(epoch)
            if not at_hand:
                self._links.board.words[ATTENTION] = 0
                self._draw()  # where the sampler raised last time, or it would be waited for in vain
                self._settle()
                self._pump()
                if not self._at_hand(epoch):
                    self._await(epoch, started)
            if epoch.end == self._order:
                self.log.end = perf_counter()
                self._attention()
                raise EndOfEpoch
            order, batch = self._order, self.assembly.take(self._order)
            self.handed = [(lo - epoch.first_serial, hi - epoch.first_serial) for lo, hi in batch.dealt]
            self._order += 1
            step_s = started - self._left if order > epoch.first_order else 0.0
            self._due.append(partial(self._tell, m.Delivered, order, step_s))
            self._draw_on()
            trains = at_hand and started - self._left > _TRAINS_S
            if not trains:
                self._links.board.words[ATTENTION] = 0
                self._settle()
                self._pump()
                self._attention()
        now = perf_counter()
        self.bad, self.survivor = batch.bad, None if batch.ends is None else batch.ends[1]
        value = self.assembly.value(batch) if batch.failure is None and batch.size else None
        refused = _refused(batch, judge)
        self._log_delivery(epoch, order, batch, now, now - started, value, refused=refused is not None)
        if trains:
            self._leave_due()
        self._left = perf_counter()
        if refused is not None:
            raise refused
        if batch.failure is None:
            return value if batch.size else NOTHING
        return self.assembly.value(batch)

    def pad(self, number: int, ticket: Ticket | None) -> Any:
        """A batch of one sample for the last one of epoch ``number``, which has lost all of its own.

        The sample of ``ticket``, an earlier one, prepared once more; without one, the first that is left of the batches
        to come. Returns NOTHING where there is none. Raises what ``next`` does.
        """
        started = perf_counter()
        with self._lock:
            if self._closed:
                raise EndOfEpoch
            epoch, order = self._epochs[number], self._order - 1
            self._links.board.words[ATTENTION] = 0
            self._settle()
            self._pump()
            ticket = ticket or self._next_survivor(epoch, started)
            if ticket is None:
                return NOTHING
            self.pump.pad(order, order - epoch.first_order, number, ticket)
            self._sleep_until(lambda: self.assembly.ready(order), started)
            batch = self.assembly.take(order)
            self._attention()
        value, now = self.assembly.value(batch), perf_counter()
        self.log.delivered(now, number, order - epoch.first_order, 0, now - started, (), padded=1)
        self._left = perf_counter()
        return value

    def _next_survivor(self, epoch: Epoch, started: float) -> Ticket | None:
        """The first sample that is left of the batches to come, which may mean to look beyond the window."""
        self.pump.handle(m.Asked(perf_counter()))
        ticket, order = None, self._order
        try:
            while ticket is None:
                # not until it is ready: a budget may hold its load back for as long as batches before it are not taken
                self._sleep_until(lambda: self.assembly.composed(order) or epoch.end == order, started)  # noqa: B023
                if epoch.end == order:
                    break
                ticket = self.assembly.first_survivor(order)
                order += 1
                self._beyond = order - self._order  # batches of which nothing is left hold no memory
                self._draw()
                self._settle()
        finally:
            self._beyond = 0
        return ticket

    def _sleep_until(self, condition: Callable[[], bool], started: float) -> None:
        while not condition():
            self._sleep(started)
            self._pump()

    def _at_hand(self, epoch: Epoch) -> bool:
        """Whether the next batch, or the end of the epoch, can be handed over."""
        return self.assembly.ready(self._order) or epoch.end == self._order

    def _await(self, epoch: Epoch, started: float) -> None:
        """Pump until the next batch is ready, or the epoch turns out to be over."""
        asked = perf_counter()
        self.pump.handle(m.Asked(asked))
        cause = self.pump.scheduler.stall_cause()
        self._sleep_until(lambda: self._at_hand(epoch), started)
        self.log.stalled(cause, perf_counter() - asked)

    def _sleep(self, started: float) -> None:
        """Until a report arrives, a worker ends, or the scheduler wants to look at what runs."""
        now = perf_counter()
        wake = self.pump.scheduler.wake_at()
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken
        self.pump.check_lanes()
        end = started + self._timeout if self._timeout > 0 else None
        hangs = None if self._watchdog is None else self._watchdog.next_look(now)
        if end is not None and now >= end:
            stuck = self.pump.lanes[m.CPU].stuck()
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds{stuck}")
        until = min(t for t in (wake, end, hangs, now + _LONGEST_SLEEP_S) if t is not None)
        ready = self._poll.poll(max(0.0, 1e3 * (until - now)))
        if any(fd in self._exit_fds for fd, _ in ready):
            self._pump()
            self._check_workers()
        if hangs is not None and perf_counter() >= hangs:
            self._look_for_hangs()
        if wake is not None and perf_counter() >= wake:
            self.pump.look()

    def _check_workers(self) -> None:
        """A worker that ended while the loader runs is replaced, or is an error, as it is PyTorch's."""
        lane = self.pump.lanes[m.CPU]
        exits: list[Exit] = lane.exits()
        if exits and not self._replaces:
            raise WorkerDied(exits[0].message())
        if not self._replaces:
            return
        if exits:
            self._pump()  # all that they had reported
        for exit_ in exits:
            LOGGER.warning("%s It is being replaced.", exit_.message().rstrip())
            self.pump.lost(lane, exit_, self.log)
        count, failed = lane.arrivals()
        for exit_ in failed:
            raise WorkerDied(exit_.message())
        self.pump.arrived(lane, count)

    def _look_for_hangs(self) -> None:
        """A worker that has hung is killed where it can be replaced; all else that hangs is an error."""
        assert self._watchdog is not None
        self._pump()  # a worker that waits for room to report has not hung
        for hung in self._watchdog.look(perf_counter()):
            lane = self.pump.lanes[hung.lane]
            text = self._watchdog.words(hung, self.pump.told_of(hung.claim, hung.lane))
            if not (self._replaces and lane.can_kill):
                raise WorkerHung(text + lane.advice)
            lane.kill(hung.worker, text)

    def _log_delivery(
        self, epoch: Epoch, order: int, batch: Batch, now: float, wait: float, value: Any, *, refused: bool
    ) -> None:
        first, number = epoch.first_serial, order - epoch.first_order
        if self._order_log is not None and not self._order_log.replays:
            self._order_log.record(epoch.number, [(lo - first, hi - first) for lo, hi in batch.dealt])
        if batch.failure is not None:
            failed = max(1, batch.failed)
            self.log.failed += failed
            self.log.skipped += batch.size - failed
            return
        self.log.failed += len(batch.bad)
        if refused:
            self.log.skipped += batch.size
        if refused or not batch.size:
            return
        late = [max(0, number - (hi - 1 - first) // self._place_size) for _, hi in batch.spans]
        late += [max(0, number - (lo - first) // self._place_size) for lo, _ in batch.spans]
        size = size_of(value) if self._streams else batch.size
        self.log.delivered(now, epoch.number, number, size, wait, late)

    def _leave_due(self) -> None:
        """Let the pump thread do what is due, soon: woken by the first worker that reports, if all are at work.

        Woken from here it would take this very core from the consumer, where workers keep all of them busy. Another
        lane that may be idle does not wait for a worker's report.
        """
        with self._lock:
            if not self._closed:
                self._links.board.words[ATTENTION] = 1
                self._links.board.fence()
                if len(self.pump.lanes) > 1 or not self._links.board.all_busy():
                    os.eventfd_write(self._links.wake, 1)

    # --- pumping (with the lock held) ----------------------------------------------------------------------

    def _attend(self) -> None:
        """The pump thread: serves while the consumer is away and the board asks for attention."""
        wait = self._wait_watching if self._replaces or self._watchdog is not None else self._wait
        while True:
            watch = wait()
            with self._lock:
                if self._closed:
                    return
                if watch and self._broken is None:
                    self._keep_watch()
                    self._attention()
                if self._due or self._links.board.words[ATTENTION]:
                    self._settle()
                    self._pump()
                    self._attention()

    def _wait(self) -> bool:
        os.eventfd_read(self._links.wake)
        return False

    def _wait_watching(self) -> bool:
        """The same, but also until a worker has ended, or may have hung; returns whether to look after them."""
        poll = select.poll()
        for fd in (self._links.wake, *(self._exit_fds if self._replaces and self._broken is None else ())):
            poll.register(fd, select.POLLIN)
        wait = None
        if self._watchdog is not None and self._broken is None:
            now = perf_counter()
            wait = 1e3 * max(0.0, self._watchdog.next_look(now) - now)
        ready = [fd for fd, _ in poll.poll(wait)]
        if self._links.wake in ready:
            os.eventfd_read(self._links.wake)
        return not ready or any(fd in self._exit_fds for fd in ready)

    def _keep_watch(self) -> None:
        """In the pump thread: what would be an error is kept for the consumer, who may never need the worker."""
        try:
            if self._replaces:
                self._check_workers()
            if self._watchdog is not None and perf_counter() >= self._watchdog.next_look(perf_counter()):
                self._look_for_hangs()
        except (WorkerDied, WorkerHung) as error:
            self._broken = error

    def _attention(self) -> None:
        """Ask workers to wake the pump thread if their reports will need an answer before the consumer is back."""
        words = self._links.board.words
        if not self.pump.needs_attention:
            words[ATTENTION] = 0
        elif not words[ATTENTION]:
            words[ATTENTION] = 1
            self._links.board.fence()
            self._pump()  # what was reported before workers could see the flag

    def _settle(self) -> None:
        """Do what deliveries have left to be done."""
        self.assembly.reclaim()
        while self._due:
            self._due.popleft()()

    def _pump(self) -> None:
        self.pump.receive()
        if isinstance(self.pump.scheduler, StreamScheduler) and self._epochs:
            next(iter(self._epochs.values())).end = self.pump.scheduler.end

    # --- the end -------------------------------------------------------------------------------------------

    def close(self, timeout: float = 2.0) -> None:
        """End lanes and thread; batches that the consumer holds live on. Idempotent, callable from anywhere."""
        if OwnThread.is_current():
            # the garbage collector ran in a thread that this would wait for, perhaps while it holds a lock
            threading.Thread(target=self.close, name="closing").start()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._links.wake, 1)
        self._thread.join()
        self.on_close()
        if self.pump.recorder is not None:
            self.pump.recorder.close()
        ended = [lane.close(timeout) for lane in self.pump.lanes.values()]
        if self.assembly.loading is not None:
            self.assembly.loading.close()
        if all(ended):
            self.assembly.clear()
            self._links.close()
