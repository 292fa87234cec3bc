"""The last step: what the consumer gets for a batch that is taken, and what is noted of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

from minato_gpu.engine.epochs import Epoch
from minato_gpu.engine.parts import Parts
from minato_gpu.lanes.base import failure, reraise
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.samples import Value
from minato_gpu.scheduling.messages import Span
from minato_gpu.window.contract import Judge
from minato_gpu.window.records import Batch


class Handover:
    """Of streams, which workers iterate for themselves, a batch's samples have no positions."""

    def __init__(self, parts: Parts, items: ItemRun) -> None:
        self._items = items
        self._assembly = parts.assembly
        log = parts.order_log
        self._records = None if log is None or log.replays else log
        self._place_size = 1 if parts.streams else parts.batch
        self._streams = parts.streams

    def __call__(
        self,
        log: Telemetry,
        epoch: Epoch,
        batch: Batch,
        positions: Sequence[Span],
        judge: Judge | None,
        asked: float,
    ) -> Value:
        """The batch of these positions as the consumer sees it, which has waited for it since ``asked``. Raises what
        ``judge`` does, where the batch must not come without its bad samples. Of a run of samples, the first."""
        if batch.items:
            self._items.begin(batch, epoch.number, positions[0][0])
            return self._items.next(log, asked)
        now = perf_counter()
        value = self.value(epoch, batch)
        try:
            if batch.bad and judge is not None:
                judge(batch.bad, batch.size)
        finally:
            if self._records is not None:  # they are dealt with, if somebody wants to know that of the next runs
                self._records.record(epoch.number, positions)
        self._log(log, epoch, batch, now, now - asked, positions)
        return value

    def value(self, epoch: Epoch, batch: Batch) -> Value:
        """The batch as the consumer sees it, where it has not failed; that it cannot be handed over is its failure."""
        if batch.failure is None and batch.size:
            try:
                return self._assembly.value(batch)
            except Exception as error:
                spans = [] if self._streams else epoch.positions(batch.dealt)
                positions = "".join(f", positions {lo} to {hi - 1}" for lo, hi in spans)
                place = f"epoch {epoch.number}, batch {batch.order - epoch.first_order}{positions}"
                batch.failure = failure(error, f"while a batch was handed over ({place})", collated=True)
        return None

    def _log(
        self,
        log: Telemetry,
        epoch: Epoch,
        batch: Batch,
        now: float,
        wait: float,
        positions: Sequence[Span],
    ) -> None:
        """The consumer waited so many seconds for the batch of these positions, and gets it ``now``."""
        first, number, size = epoch.first_serial, batch.order - epoch.first_order, batch.size
        if (streams := epoch.source.streams) is not None and (told := streams.told.get(batch.dealt[0][0])) is not None:
            size = max(1, told.size)
        if batch.failure is not None:
            failed = max(1, batch.failed)
            log.lost(failed, size - failed)
            return
        if not size:
            return
        late = [max(0, number - (hi - 1 - first) // self._place_size) for _, hi in batch.spans]
        late += [max(0, number - (lo - first) // self._place_size) for lo, _ in batch.spans]
        log.delivered(now, number, size, wait, late, positions=positions)


class ItemRun:
    """Samples that were taken together, and are delivered one by one. ``left``: how the consumer gets at each."""

    def __init__(self) -> None:
        self.left: deque[Callable[[], Value]] = deque()
        self.epoch = 0
        self._position = self._number = 0  # in the sampler's order, and among the epoch's batches

    def begin(self, batch: Batch, epoch: int, position: int) -> None:
        """These are the next."""
        self.left.extend(batch.items)
        self.epoch, self._position, self._number = epoch, position, batch.number

    @property
    def span(self) -> list[Span]:
        """The positions of the next."""
        return [(self._position, self._position + 1)]

    def next(self, log: Telemetry, asked: float) -> Value:
        """The next as the consumer sees it. Raises what keeps it from being handed over."""
        lent, positions, number = self.left.popleft(), self.span, self._number
        self._position, self._number = self._position + 1, number + 1
        try:
            value = lent()
        except Exception as error:
            log.lost(1, 0)
            place = f"epoch {self.epoch}, batch {number}, position {positions[0][0]}"
            reraise(failure(error, f"while a batch was handed over ({place})", collated=True).error)
        now = perf_counter()
        log.delivered(now, number, 1, now - asked, (0,), positions=positions)
        return value
