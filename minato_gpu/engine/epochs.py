"""The epochs that run through an engine: their samplers are drawn, and what they yield is numbered and admitted.

Places, serials and orders (see ``scheduling.messages``) rise through a run, over all of its epochs.

Samplers are only ever advanced on the consumer's thread, because the window moves only when a batch is delivered. A
sampler's error does not concern that batch: the consumer gets the batch, and the error on its next call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter

from minato_gpu.engine.parts import Parts
from minato_gpu.engine.pump import Pump
from minato_gpu.faults.deferred_error import DeferredError
from minato_gpu.samples import OutputBatch, SourceBatch, TicketId
from minato_gpu.sampling.epoch_batches import Drawn, EpochBatches
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.spans import Span, TicketSpan, shifted
from minato_gpu.window.records import Batch, Record

_CHEAP_S = 200e-6  # seconds of a sample delivered alone, to prepare or to use; cheaper ones are drawn together
_WIDE_BYTES = 1 << 20  # most bytes of such a group


class Epoch:
    """One pass over the sampler: its tickets so far, and its end in the order of delivery, once that is known."""

    def __init__(self, source: EpochBatches, first_order: OutputBatch, first_serial: TicketId) -> None:
        """``first_order`` and ``first_serial`` belong to its first position, whether this run delivers that or not."""
        self.source = source
        self.number = source.number
        self.first_order = first_order
        self.first_serial = first_serial
        self.end: OutputBatch | None = None

    def samples_after(self, serial: TicketId) -> int | None:
        """Returns how many samples are to follow from ``serial`` on, by the sampler's length.

        None if the sampler has no length, or has yielded more already.
        """
        said = self.source.length
        left = -1 if said is None else said - (serial - self.first_serial)
        return None if left < 0 else left

    def positions(self, spans: Iterable[TicketSpan]) -> list[Span]:
        """Returns the positions of these tickets in the sampler's order."""
        return shifted(spans, -self.first_serial)


class Epochs:
    """The epochs of one run: the one that is delivered, and those that are prefetched."""

    def __init__(self, pump: Pump, parts: Parts) -> None:
        self._pump = pump
        self._parts, self._settings = parts, parts.settings
        self._reads = parts.reads
        self._item_s = _CHEAP_S  # typical seconds of a sample that is delivered alone
        # where each batch is one sample: batches drawn together as one place; the window is as many times as long
        self._together = 1
        self._forget()

    def _forget(self) -> None:
        self._epochs: dict[int, Epoch] = {}
        self._drawing: deque[Epoch] = deque()
        self._due: deque[Callable[[float], m.Event]] = deque()  # not sent to the scheduler yet
        self.raised = DeferredError()  # what a sampler raised while a batch was ready
        self.order = OutputBatch(0)  # order of the batch to deliver next
        self._serial, self._place, self._drawn = TicketId(0), SourceBatch(0), SourceBatch(0)
        # drawn but not admitted: a batch (with the spans that an earlier run left of it; None: all), the end of an
        # epoch, or a sampler's exception
        self._ahead: deque[tuple[Record | Epoch | Exception, tuple[tuple[int, int], ...] | None]] = deque()

    def __getitem__(self, number: int) -> Epoch:
        """Returns the epoch of that number."""
        return self._epochs[number]

    @property
    def first(self) -> Epoch | None:
        """The epoch that is delivered; None before the first."""
        return next(iter(self._epochs.values()), None)

    @property
    def drained(self) -> bool:
        """True if every sampler has ended while the window has room."""
        window = self._settings.window * self._together + self._pump.run.scheduler.window.extra
        return not self._drawing and self._drawn - self.order < window + self._parts.read_ahead

    def stats(self) -> dict[str, int]:
        """Returns the window's length in batches, its longest so far, its maximum, and the bytes up to which it
        grows."""
        window, least = self._pump.run.scheduler.window, self._settings.window * self._together
        lengths = {"batches": least + window.extra, "longest": least + window.longest, "most": least + window.most}
        return {**lengths, "limit_bytes": window.limit}

    @property
    def delivered_all(self) -> bool:
        """True if nothing but prefetched epochs is left to deliver."""
        return self.first is None or self.first.end == self.order

    @property
    def due(self) -> bool:
        """True if events have not been sent to the scheduler yet."""
        return bool(self._due)

    def start(self, source: EpochBatches) -> None:
        """Begins a run with this epoch, of which an earlier run may have delivered some."""
        self._forget()
        self._resume(source)
        self.add(source)

    def go_on(self, number: int) -> None:
        """Makes a prefetched epoch the one that is delivered."""
        self._epochs = {number: self._epochs[number]}

    def add(self, source: EpochBatches, *, early: bool = False) -> None:
        """Adds an epoch, to be drawn once those before it are; ``early``: it is prefetched."""
        resumed = source.delivered.batches > 0 or (source.streams is not None and source.streams.batches > 0)
        first = OutputBatch(0 if resumed else self._drawn)
        epoch = Epoch(source, first, TicketId(0) if resumed else self._serial)
        self._epochs[source.number] = epoch
        self._pump.run.add_epoch(source.number, source.seed)
        if self._reads is not None:
            self._reads.begin(source, early=early)
        if not self._settings.streams:
            self._drawing.append(epoch)

    def _resume(self, source: EpochBatches) -> None:
        """Goes on with places, batches and serials after those of the epoch that an earlier run has delivered."""
        starts = {} if source.streams is None else dict(enumerate(source.streams.starts))
        for worker, start in self._pump.run.stream_starts.items():  # of streams that had ended: their workers stay
            if worker not in starts and (following := start.next_epoch) is not None:
                starts[worker] = following
        self._pump.run.streams, self._pump.run.stream_starts = source.streams, starts
        if source.streams is not None and (source.streams.batches or source.streams.ended):
            self.order = OutputBatch(source.streams.batches)
            turn, ended = source.streams.turn, tuple(source.streams.ended)
            self._pump.run.handle(m.Resumed(perf_counter(), self.order, turn, ended))
        elif source.delivered.batches:
            self._place, self._serial = SourceBatch(source.place), TicketId(source.position)
            self._drawn, self.order = self._place, OutputBatch(source.delivered.batches)
            self._pump.run.handle(m.Resumed(perf_counter(), self.order))

    def draw(self) -> None:
        """Draws batches until the window, and ``read_ahead`` batches beyond it, are full.

        An error of a sampler is raised once the window, had it not grown, would have come to where it occurred.
        """
        raises_below = self.order + self._settings.window * self._together
        limit = raises_below + self._pump.run.scheduler.window.extra
        most = limit + self._parts.read_ahead - self._together
        while self._drawing and self._drawn <= most and not self._ends_in_error:
            try:
                self._draw_next(self._drawing[0])
            except Exception as error:
                if not self._ahead and self._place < raises_below:
                    raise
                self._ahead.append((error, ()))
            self._enter(limit, raises_below)
        self._enter(limit, raises_below)

    @property
    def _ends_in_error(self) -> bool:
        return bool(self._ahead) and isinstance(self._ahead[-1][0], Exception)

    def _draw_next(self, epoch: Epoch) -> None:
        drawn, error = epoch.source.draw(), None
        if drawn is None:
            self._drawing.popleft()
            epoch.end = OutputBatch(self._drawn)
            self._ahead.append((epoch, ()))
            return
        batches = 1
        if self._together > 1 and drawn.left is None:
            drawn, error = _more(epoch, drawn, self._together)
            batches = len(drawn.keys)
        record = Record(epoch.number, self._serial, drawn.positions, drawn.keys, drawn.occurrences, epoch.first_order)
        self._serial = record.end
        self._drawn = SourceBatch(self._drawn + batches)
        if self._reads is not None:
            self._reads.want(record, ((0, record.rows),) if drawn.left is None else drawn.left)
        self._ahead.append((record, drawn.left))
        if error is not None:
            raise error

    def _enter(self, limit: int, raises_below: int) -> None:
        """Admits drawn places to the window, up to ``limit``, and raises errors up to ``raises_below``."""
        while self._ahead and self._place < limit:
            drawn, left = self._ahead[0]
            if isinstance(drawn, Exception) and self._place >= raises_below:
                return
            self._ahead.popleft()
            if isinstance(drawn, Exception):
                raise drawn
            if isinstance(drawn, Epoch):
                self._due.append(partial(m.Ended, epoch=drawn.number))
                continue
            # of what an earlier run delivered in part, the rest enters in pieces, each a record of its own
            pieces = [drawn] if left is None else [drawn.part(lo, hi) for lo, hi in left or ((0, 0),)]
            batch = 0 if self._place < self.order else None if left is None else drawn.rows
            for piece in pieces:
                self._due.append(partial(self._admit, self._place, piece, batch))
                batch = 0
            self._place = SourceBatch(self._place + (drawn.rows if self._settings.items else 1))

    def draw_on(self) -> bool:
        """Draws while the consumer has a batch ready; returns False, with nothing drawn, where there is not yet room
        for as many batches as are admitted together.

        An error of the sampler is kept until the consumer asks for more. An interrupt passes through: it is not the
        sampler's, and the consumer wants it now.
        """
        window = self._pump.run.scheduler.window
        if window.together > 1 and not self._ahead:
            room = self.order + self._settings.window + window.extra - self._drawn
            if 0 <= room < window.together:
                return False
        try:
            self.draw()
        except Exception as error:
            self.raised.keep(error)
        return True

    def draw_ahead(self) -> None:
        """Draws for a prefetched epoch. A sampler that raises is not drawn from again before the epoch begins;
        its error is raised."""
        try:
            self.draw()
            if self._ends_in_error:
                raise self._ahead.pop()[0]  # type: ignore[misc]  # it is an exception, as the property says
        except BaseException:
            self._drawing.clear()
            raise

    def delivered(self, step_s: float, batch: Batch) -> None:
        """Notes that the consumer has ``batch``, for which it asked ``step_s`` seconds after it got the last one."""
        self._due.append(partial(self._delivered, self.order, step_s))
        self.order = OutputBatch(self.order + batch.orders)
        if batch.items:
            self._widen(max(step_s, self._pump.run.typical_s), batch.nbytes // batch.orders)

    def _widen(self, seconds: float, nbytes: int) -> None:
        """Doubles the samples drawn together, and so the window in batches, while samples are cheap; else halves them.

        ``seconds``, to prepare or to use, and ``nbytes``: of each sample of the last batch.
        """
        typical = self._item_s * (1.1 if seconds > self._item_s else 0.9)  # near the median: a busy machine's vary
        self._item_s = max(typical, _CHEAP_S / 2)
        most = self._together // 2 if typical > _CHEAP_S else min(self._settings.items, _WIDE_BYTES // max(nbytes, 1))
        self._together = max(1, min(2 * self._together, most))

    def _delivered(self, order: OutputBatch, step_s: float, now: float) -> m.Delivered:
        return m.Delivered(now, order, step_s, self._parts.assembly.holdings.bytes, self._together)

    def settle(self) -> None:
        """Sends the scheduler all events that it has not got yet."""
        run, due = self._pump.run, self._due
        while due:
            event = due.popleft()(perf_counter())
            if due:
                run.scheduler.note(event)
            else:
                run.handle(event)

    def _admit(self, place: SourceBatch, record: Record, batch: int | None, now: float) -> m.Admitted:
        """Returns the event by which a place enters the window, also if nothing of its batch is left to deliver."""
        homes = self._settings.policy.homes
        home = homes[(place - record.begins) % len(homes)]
        if not record.rows:
            return m.Admitted(now, place, record.epoch, record.first, 0, batch=batch, home=home)
        estimates = self._parts.estimates
        self._parts.assembly.admit(record)
        cpu = None if estimates is None else estimates.of_keys(record.keys)
        fetched = None if self._reads is None else self._reads.admit(record)
        what = place, record.epoch, record.first, record.rows, cpu
        epoch = self._epochs.get(record.epoch)
        follow = None if epoch is None else epoch.samples_after(record.end)
        return m.Admitted(now, *what, batch=batch, home=home, fetched=fetched, follow=follow)


def _more(epoch: Epoch, first: Drawn, most: int) -> tuple[Drawn, BaseException | None]:
    """Draws up to ``most`` batches of one sample each, beginning with ``first``.

    Returns them as one, and the sampler's error, if any.
    """
    keys, counts, error = [*first.keys], [*(first.occurrences or (0,))], None
    try:
        while len(keys) < most and (drawn := epoch.source.draw()) is not None:
            keys += drawn.keys
            counts += drawn.occurrences or (0,)
    except BaseException as raised:  # what was drawn before comes first
        error = raised
    at = first.positions[0]
    return Drawn(range(at, at + len(keys)), keys, counts if any(counts) else None), error  # type: ignore[arg-type]
