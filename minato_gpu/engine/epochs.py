"""The epochs that run through an engine: their samplers are drawn, and what they yield is numbered and admitted.

Places, serials and orders (see ``scheduling.messages``) rise through a run, over all of its epochs.

Samplers are only ever advanced on the consumer's thread, because the window moves only when a batch is delivered. What
one raises then has nothing to do with that batch: the consumer gets it, and the error when it asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from minato_gpu.engine.pump import Pump
from minato_gpu.faults.deferred import DeferredError
from minato_gpu.memory.status_board import WorkerStatusBoard
from minato_gpu.sampling.order_log import OrderLog
from minato_gpu.sampling.sources import Drawn, Source
from minato_gpu.scheduling import messages as m
from minato_gpu.window.records import Record


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


class Epochs:
    """The epochs of one run: the one that is delivered, and those that are prefetched.

    ``window``: batches drawn and not delivered; ``homes``: which device lanes may prepare an epoch's batches, in turn;
    ``streams``: nothing is drawn, workers iterate for themselves; ``order_log``: may replay what an earlier run has
    delivered.
    """

    def __init__(
        self,
        pump: Pump,
        board: WorkerStatusBoard,
        *,
        window: int,
        homes: Sequence[str],
        streams: bool,
        order_log: OrderLog | None,
    ) -> None:
        self._pump = pump
        self._board = board
        self._window = window
        self._homes = homes
        self._streams = streams
        self._order_log = order_log
        self.beyond = 0  # batches that the window is longer by
        self._forget()

    def _forget(self) -> None:
        self._epochs: dict[int, Epoch] = {}
        self._drawing: deque[Epoch] = deque()
        self._due: deque[Callable[[], None]] = deque()  # what the scheduler has not been told yet
        self.raised = DeferredError()  # what a sampler raised while a batch lay at hand
        self.order = 0  # of the batch to deliver next
        self._serial = self._place = 0

    def __getitem__(self, number: int) -> Epoch:
        """The epoch of that number."""
        return self._epochs[number]

    @property
    def first(self) -> Epoch | None:
        """The one that is delivered."""
        return next(iter(self._epochs.values()), None)

    @property
    def drained(self) -> bool:
        """Whether every sampler has ended while the window has room."""
        return not self._drawing and self._place - self.order < self._window

    @property
    def delivered_all(self) -> bool:
        """Whether nothing but prefetched epochs is left to deliver."""
        return self.first is None or self.first.end == self.order

    @property
    def due(self) -> bool:
        """Whether there is something that the scheduler has not been told."""
        return bool(self._due)

    def start(self, source: Source) -> None:
        """Begin a run with this epoch, of which an earlier run may have delivered some."""
        self._forget()
        self._resume(source)
        self.add(source)

    def go_on(self, number: int) -> None:
        """A prefetched epoch is the one that is delivered now."""
        self._epochs = {number: self._epochs[number]}

    def add(self, source: Source) -> None:
        """One more epoch is to be drawn, once those before it are."""
        log = self._order_log
        replay = log.replay(source) if log is not None and log.replays else None
        resumed = source.delivered.batches > 0 or (source.streams is not None and source.streams.batches > 0)
        epoch = Epoch(source, replay, 0 if resumed else self._place, 0 if resumed else self._serial)
        self._epochs[source.number] = epoch
        self._pump.run.add_epoch(source.number, source.seed)
        if not self._streams:
            self._drawing.append(epoch)

    def _resume(self, source: Source) -> None:
        """An earlier run has delivered some of the epoch: number places, batches and serials on from there."""
        starts = {} if source.streams is None else dict(enumerate(source.streams.starts))
        for worker, start in self._pump.run.stream_starts.items():  # of streams that had ended: their workers stay
            if worker not in starts and (following := start.next_epoch) is not None:
                starts[worker] = following
        self._pump.run.streams, self._pump.run.stream_starts = source.streams, starts
        if source.streams is not None:
            source.streams.on_saves = self._board.expect_saves
            self._board.expect_saves(True)
        if source.streams is not None and (source.streams.batches or source.streams.ended):
            self.order = source.streams.batches
            turn, ended = source.streams.turn, tuple(source.streams.ended)
            self._tell(m.Resumed, self.order, turn=turn, ended=ended)
        elif source.delivered.batches:
            self._place, self._serial, self.order = source.place, source.position, source.delivered.batches
            self._tell(m.Resumed, self.order)

    def draw(self) -> None:
        """Draw batches until the window is full. Raises what a sampler does."""
        while self._drawing and self._place - self.order < self._window + self.beyond:
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
                batch = None if self._place >= self.order else 0
                self._due.append(partial(self._admit, self._place, record, batch))
            else:
                self._admit_left(record, drawn.left)
            self._place += 1

    def draw_on(self) -> None:
        """Draw while a batch is at hand: what a sampler raises is kept for when the consumer asks for more.

        An interrupt passes through: it is not the sampler's, and the consumer wants it now.
        """
        try:
            self.draw()
        except Exception as error:
            self.raised.keep(error)

    def draw_ahead(self) -> None:
        """Draw for a prefetched epoch. What raises is not drawn from again before it begins."""
        try:
            self.draw()
        except BaseException:
            self._drawing.clear()
            raise

    def delivered(self, step_s: float) -> None:
        """The next batch is the consumer's, which was away for ``step_s`` seconds before."""
        self._due.append(partial(self._tell, m.Delivered, self.order, step_s))
        self.order += 1

    def settle(self) -> None:
        """Tell the scheduler what it has not been told."""
        while self._due:
            self._due.popleft()()

    def _admit_left(self, record: Record, left: tuple[m.Span, ...]) -> None:
        """An earlier run delivered the rest of this place: what is left enters in pieces, each a record of its own."""
        batch = record.rows if self._place >= self.order else 0
        if not left:
            what = self._place, record.epoch, record.first, 0
            self._due.append(partial(self._tell, m.Admitted, *what, batch=batch, home=self._home(self._place, record)))
        for lo, hi in left:
            piece = record.part(lo, hi)
            self._due.append(partial(self._admit, self._place, piece, batch))
            batch = 0

    def _admit(self, place: int, record: Record, batch: int | None = None) -> None:
        estimates = self._pump.estimates
        self._pump.assembly.admit(record)
        cpu, device = (None, None) if estimates is None else estimates.of_keys(record.keys)
        what = place, record.epoch, record.first, record.rows, cpu, device
        self._tell(m.Admitted, *what, batch=batch, home=self._home(place, record))

    def _home(self, place: int, record: Record) -> str:
        """Which device lanes may prepare the place."""
        return self._homes[(place - record.begins) % len(self._homes)]

    def _tell(self, event: Callable[..., m.Event], *what: Any, **more: Any) -> None:
        self._pump.run.handle(event(perf_counter(), *what, **more))
