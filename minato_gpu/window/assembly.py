"""From ready samples to batches.

Samples that can be stacked lie in rows (``samples``), and so do their batches. Whatever ``default_collate`` would not
simply stack, and every custom ``collate_fn``, is joined by a worker (a *job*), on views of shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from minato_gpu.lanes.base import (
    Blob,
    Failure,
    Item,
    Joined,
    Laid,
    Local,
    NoSample,
    Piece,
    Reference,
    Unshippable,
    reraise,
)
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.samples import OutputBatch, Ticket, TicketId, Value
from minato_gpu.scheduling.messages import Compose, TicketSpan, serials, singles, tickets
from minato_gpu.spans import without
from minato_gpu.window.host_memory import HostMemoryAccount, lying
from minato_gpu.window.loading import Loading
from minato_gpu.window.records import Batch, Record, Window
from minato_gpu.window.samples import Samples


class Assembly:
    """Samples that lie in shared memory until their batch is delivered.

    ``stacks``: batches are what ``default_collate`` makes of the samples, so rows can be stacked in place.
    ``joins_whole``: a batch whose composition is settled and whose samples one worker prepares may be collated there.
    ``items``: each sample is a batch by itself, which its worker has collated; a batch here is a run of them.
    ``loading``: batches go to a device. ``skips``: a batch is delivered without the samples that failed.
    """

    def __init__(
        self,
        links: WorkerChannels,
        *,
        stacks: bool,
        joins_whole: bool,
        items: bool = False,
        loading: Loading | None = None,
        skips: bool = False,
    ) -> None:
        self.loading = loading
        self.holdings = HostMemoryAccount(links, loading)
        self._completions = links.completions
        self._joins_whole = joins_whole
        self._items = items
        self._skips = skips
        self.window = Window()
        self.samples = Samples(links, self.window, self.holdings, stacks=stacks, loading=loading)
        self._batches: dict[OutputBatch, Batch] = {}

    # --- tickets -------------------------------------------------------------------------------------------

    def admit(self, record: Record) -> None:
        """A place enters the window; places come in rising order of serials."""
        record.marks = self._completions.reserve(record.rows)
        self.window.admit(record)
        if self.loading is not None:
            self.loading.admit(record)

    @property
    def needs_jobs(self) -> bool:
        """Whether batches may have to be joined by a worker, or to be stacked from what is not in rows yet."""
        return self.samples.layout is None and not self._items

    def pieces(self, spans: Iterable[TicketSpan], *, inspect: bool) -> tuple[Piece, ...]:
        """The task's tickets: keys, and the rows where the samples go (but not to ``inspect`` them only)."""
        parts = self.window.parts(spans)
        return tuple(self._piece(record, lo - record.first, hi - record.first, inspect) for record, lo, hi in parts)

    def _piece(self, record: Record, a: int, b: int, inspect: bool) -> Piece:
        if not inspect:
            self.samples.give_slab(record)
        complete = b - a == record.rows
        empty = isinstance(record.keys[0], NoSample)
        sources = None
        if record.sources and not inspect:
            # of one place some may have been fetched before a device lane opened: those were never inspected
            sources = [record.sources.get(serial) for serial in serials(record.first, record.end)[a:b]]
        positions = record.positions[a:b]
        return Piece(
            positions[0],
            record.keys if complete else record.keys[a:b],
            None if record.occurrences is None else record.occurrences[a:b],
            -1 if empty else record.slab,
            record.rows,
            a,
            (complete and self._joins_whole) or empty,
            sources,
            None if isinstance(positions, range) else positions,
            record.marks + a,
        )

    # --- batches -------------------------------------------------------------------------------------------

    def compose(self, compose: Compose) -> bool:
        """A batch's composition is settled; returns whether a job must join it (``references``)."""
        number = compose.order - self.window.at(compose.spans[0][0]).begins
        batch = self._batches[compose.order] = Batch(compose.spans, compose.order, number)
        if self._skips and compose.failed:
            failed = sorted(compose.failed)
            items = [self._failed(serial) for serial in failed]
            if not any(item.collated for item in items):  # else it is the batch itself that failed
                self._leave_out(batch, failed, items)
                compose = replace(compose, spans=batch.spans, failed=())
            if not batch.size:
                batch.ready = True
                return False
        self._note_ends(batch)
        failure = self._failure(compose)
        if failure is not None:
            batch.failure, batch.ready, batch.failed = failure, True, len(compose.failed)
            batch.nbytes = self.samples.nbytes(batch.spans)
            self._drop(compose.spans)
            return False
        if self._items:
            self._compose_items(batch)
            return False
        item = self.window.at(compose.spans[0][0]).items.get(compose.spans[0][0])
        if isinstance(item, (Blob, Local)) and item.collated:
            batch.nbytes = item.nbytes
            self.taken(compose.spans)
            self._came(batch, item)
            return False
        if self.samples.in_rows(compose.spans):
            self.samples.stack(batch)
            batch.ready = batch.load is None
            self.taken(compose.spans)
            return False
        batch.nbytes = self.samples.nbytes(batch.spans)
        return True

    def _compose_items(self, batch: Batch) -> None:
        """A run of samples is there: lent from now on, as any batch that is no rows (``_came``)."""
        for serial in tickets(batch.spans):
            item = self.window.at(serial).items.pop(serial)
            assert isinstance(item, (Blob, Local))
            batch.nbytes += item.nbytes
            batch.items.append(self.holdings.lend(item))
        batch.ready, batch.orders = True, batch.size
        self.taken(batch.spans)
        first = batch.spans[0][0]
        batch.dealt = ((first, TicketId(first + 1)),)

    def _leave_out(self, batch: Batch, holes: list[TicketId], bad: list[Failure]) -> None:
        """The batch comes without these samples, which failed."""
        batch.spans = tuple(without(batch.spans, singles(sorted(holes))))
        batch.bad += bad
        batch.size -= len(bad)
        self._note_ends(batch)
        self._drop(tuple(singles(holes)))

    def _note_ends(self, batch: Batch) -> None:
        """Where samples may be left out: remember which of this batch another could repeat."""
        batch.ends = None
        if self._skips and batch.spans:
            both = batch.spans[0][0], TicketId(batch.spans[-1][1] - 1)
            ends = [self.window.at(serial).ticket(serial) for serial in both]
            if not isinstance(ends[0].index, NoSample):
                batch.ends = (ends[0], ends[1])

    def expect_another(self, order: OutputBatch, number: int) -> None:
        """Batch ``order``, ``number`` in its epoch, has been taken: another is to be ``joined`` in its place."""
        self._batches[order] = Batch((), order, number)

    def first_survivor(self, order: OutputBatch) -> Ticket | None:
        """The first sample of a batch that is ready, if it has any."""
        batch = self._batches[order]
        return None if batch.ends is None or batch.failure is not None else batch.ends[0]

    def spans(self, order: OutputBatch) -> tuple[TicketSpan, ...]:
        """The samples that a composed batch consists of."""
        return self._batches[order].spans

    def references(self, spans: tuple[TicketSpan, ...]) -> list[Reference] | None:
        """Where the samples of a batch lie, for the job that joins them; None when it must prepare them itself."""
        if self.loading is not None:
            self.samples.bring_to_host(self.window.parts(spans))
        references = [self.samples.reference(serial) for serial in tickets(spans)]
        return None if any(isinstance(item, Unshippable) for item in references) else references

    def joined(self, order: OutputBatch, item: Item) -> None:
        """The job for this batch is done."""
        batch = self._batches[order]
        if isinstance(item, Joined):
            self._lose(batch, item.bad)
            item = item.item
        assert item is None or isinstance(item, (Blob, Local, Failure))
        self.holdings.bytes -= batch.nbytes
        batch.nbytes = 0 if item is None else item.nbytes
        self.holdings.count(batch.nbytes)
        self._drop(batch.spans)
        if isinstance(item, (Blob, Local)):
            self._came(batch, item)
        else:
            batch.failure, batch.ready = item, True

    def lose(self, order: OutputBatch, failed: Failure) -> bool:
        """The job for this batch cannot prepare one of its samples; returns whether it is to go on without it."""
        batch = self._batches[order]
        if not self._skips:
            self.joined(order, replace(failed, collated=True))
            return False
        self._lose(batch, [failed])
        if not batch.size:
            self.holdings.bytes -= batch.nbytes
            batch.nbytes, batch.ready = 0, True
        return bool(batch.size)

    def _lose(self, batch: Batch, bad: list[Failure]) -> None:
        positions = {failure.origin.position for failure in bad if failure.origin is not None}
        holes = [serial for serial in tickets(batch.spans) if self.window.position(serial) in positions]
        self._leave_out(batch, holes, bad)

    def _came(self, batch: Batch, item: Laid) -> None:
        """A batch that is no rows is there. It is lent from now on: once it were neither in the window nor lent, the
        death of the worker that made it would give its memory to the next one."""
        lent = self.holdings.lend(item)
        if self.loading is None:
            batch.lent, batch.ready = lent, True
        else:
            self.loading.value(batch, lent)

    def ready(self, order: OutputBatch) -> bool:
        """Whether the batch can be taken."""
        batch = self._batches.get(order)
        return batch is not None and (batch.ready or (batch.load is not None and batch.load.issued))

    def composed(self, order: OutputBatch) -> bool:
        """Whether it is known what the batch consists of: it can be taken, or is on its way to a device."""
        batch = self._batches.get(order)
        return batch is not None and (batch.ready or batch.load is not None)

    def make_room(self) -> None:
        """Where a device has no memory for the batch that is due, samples that are in no batch yet leave it."""
        ways = () if self.loading is None else self.loading.transfers
        for transfers in (each for each in ways if each.wants_room):
            try:
                parts = ((record, record.first, record.end) for record in self.window.records)
                self.samples.bring_to_host(parts, transfers.accelerator)
                for other in {*ways} - {transfers}:  # of what this device has made for their batches
                    other.let_go()
            finally:
                transfers.room_made()

    def expect(self, order: OutputBatch, begins: OutputBatch) -> None:
        """The consumer takes batch ``order`` next; ``begins``: the order of its epoch's first one."""
        if self.loading is not None:
            self.loading.expect(order, begins)

    def take(self, order: OutputBatch) -> Batch:
        """The batch leaves the window; its memory is the consumer's from now on."""
        batch = self._batches.pop(order)
        self.holdings.bytes -= batch.nbytes
        if self.loading is not None:
            self.loading.leave(batch)
            self.loading.expect(OutputBatch(order + 1), OutputBatch(batch.order - batch.number))
        return batch

    def value(self, batch: Batch) -> Value:
        """The batch as the consumer sees it, safe on the calling thread's current stream. Raises the sample's or the
        collate function's own error."""
        if batch.failure is not None:
            reraise(batch.failure.error)
        assert batch.lent is not None
        return batch.lent()

    def clear(self) -> tuple[list[int], list[object]]:
        """Forget every ticket and batch; returns their blocks of marks, to be given back, and what owns their memory,
        which is free once nobody refers to it."""
        memory: list[object] = [self.holdings.lend(blob) for blob in self._blobs()]
        memory += [record.memory for record in self.window.records]
        marks = [record.marks for record in self.window.records]
        self.window.clear()
        if self.loading is not None:
            for batch in self._batches.values():
                self.loading.leave(batch)
        self._batches, self.holdings.bytes = {}, 0
        return marks, memory

    def settle_with(self, owner: int) -> list[tuple[int, int]]:
        """A worker has died: nobody is left to be told what comes back. Returns its blocks (offset, bytes) in use."""
        lent = self.holdings.bury(owner)
        return [block for blob in self._blobs() if blob.worker == owner for block in blob.blocks] + lent

    def _blobs(self) -> list[Blob]:
        """What lies in workers' arenas for tickets in the window. (That of batches is lent.)"""
        records = self.window.records
        items = [item for record in records for item in (*record.items.values(), *map(lying, record.sources.values()))]
        return [item for item in items if isinstance(item, Blob)]

    # --- inside --------------------------------------------------------------------------------------------

    def _failure(self, compose: Compose) -> Failure | None:
        first = compose.spans[0][0]
        item = self.window.at(first).items.get(first)
        if isinstance(item, Failure):
            return item
        return self._failed(min(compose.failed)) if compose.failed else None

    def _failed(self, serial: TicketId) -> Failure:
        item = self.window.at(serial).items[serial]
        assert isinstance(item, Failure)
        return item

    def _drop(self, spans: tuple[TicketSpan, ...]) -> None:
        """Free the single samples of a batch that has been joined, or has failed."""
        for serial in tickets(spans):
            self.holdings.release(self.window.at(serial).items.pop(serial, None))
        self.taken(spans)

    def taken(self, spans: Iterable[TicketSpan]) -> None:
        """A batch has taken these samples, or there are no such ones; places that are used up leave the window."""
        for record, lo, hi in self.window.parts(spans):
            record.left -= hi - lo
            if record.left == 0:
                self.window.remove(record)
                self._completions.give_back(record.marks)
