"""The last step of a batch: its value for the consumer, and what is logged of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from minato_gpu.engine.epochs import Epoch
from minato_gpu.engine.parts import Parts
from minato_gpu.lanes.base import failure, reraise
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.samples import TicketId, Value
from minato_gpu.sampling.worker_streams import WorkerStreams
from minato_gpu.scheduling.spans import Span, tickets
from minato_gpu.window.contract import Judge
from minato_gpu.window.records import Batch


class Handover:
    """Hands batches over to the consumer. Samples of streams, which workers iterate themselves, have no positions."""

    def __init__(self, parts: Parts) -> None:
        self.items = ItemRun(parts.settings.batch)
        self._assembly = parts.assembly
        self._whole = parts.settings.batch
        self._place_size = 1 if parts.settings.streams else parts.settings.batch

    def __call__(
        self,
        log: Telemetry,
        epoch: Epoch,
        batch: Batch,
        positions: Sequence[Span],
        judge: Judge,
        asked: float,
    ) -> Value:
        """Returns the batch of these positions as the consumer sees it, and counts it in ``log``; the consumer has
        waited since ``asked``.

        Of samples that are delivered one by one it returns the first, or raises its error. Otherwise an error of
        handing the batch over becomes the batch's failure; of a batch that has one, or no samples, it returns None.
        Raises what ``judge`` raises, if the batch must not come without its bad samples.
        """
        if batch.items:
            self.items.begin(batch, epoch)
            return self.items.next(log, asked)
        now, value, size, streams = perf_counter(), None, batch.size, epoch.source.streams
        first, number = epoch.first_serial, batch.number
        if batch.failure is None and size:
            try:
                value = self._assembly.value(batch)
            except Exception as error:
                spans = positions if streams is None else ()
                place = "".join(f", positions {lo} to {hi - 1}" for lo, hi in spans)
                where = f"while a batch was handed over (epoch {epoch.number}, batch {number}{place})"
                batch.failure = failure(error, where, collated=True)
        if batch.bad:
            judge(batch.bad, size)
        if streams is not None:
            size = streams.size_of(batch.dealt[0][0], self._whole)
        if batch.failure is not None:
            failed = max(1, batch.failed)
            log.lost(failed, size - failed)
        elif size:
            late = [max(0, number - (hi - 1 - first) // self._place_size) for _, hi in batch.spans]
            late += [max(0, number - (lo - first) // self._place_size) for lo, _ in batch.spans]
            log.delivered(now, number, size, now - asked, late, positions=positions)
        return value


class ItemRun:
    """Samples (or batches of workers' own streams) that were taken together and are delivered one by one."""

    def __init__(self, whole: int) -> None:
        self._whole = whole  # samples of a batch of a worker's stream
        self.left: deque[Callable[[], Value]] = deque()  # return the items
        self.epoch = 0
        self._tickets: Iterator[TicketId] = iter(())
        self._number = self._first = 0  # among the epoch's batches; the epoch's first serial
        self._streams: WorkerStreams | None = None

    def begin(self, batch: Batch, epoch: Epoch) -> None:
        """Begins with the items of this batch."""
        self.left.extend(batch.items)
        self.epoch, self._number, self._first = epoch.number, batch.number, epoch.first_serial
        self._streams, self._tickets = epoch.source.streams, tickets(batch.spans)
        self._advance()

    def _advance(self) -> None:
        self._position = next(self._tickets, TicketId(0)) - self._first

    @property
    def span(self) -> list[Span]:
        """The position of the next item, as a span; of a stream's batch, its ticket."""
        return [(self._position, self._position + 1)]

    def next(self, log: Telemetry, asked: float) -> Value:
        """Returns the next item as the consumer sees it, and counts it in ``log``; the consumer has waited since
        ``asked``. Raises what keeps it from being handed over."""
        lent, positions, number = self.left.popleft(), self.span, self._number
        size = 1 if self._streams is None else self._streams.size_of(self._position, self._whole)
        self._number = number + 1
        self._advance()
        try:
            value = lent()
        except Exception as error:
            log.lost(1, size - 1)
            place = f"epoch {self.epoch}, batch {number}"
            reraise(failure(error, f"while a batch was handed over ({place})", collated=True).error)
        now = perf_counter()
        log.delivered(now, number, size, now - asked, (0,), positions=positions)
        return value
