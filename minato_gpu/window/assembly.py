"""Makes batches of ready samples.

Samples that can be stacked are rows (``samples``), and so are their batches. Whatever ``default_collate`` would not
simply stack, and every custom ``collate_fn``, is joined by a worker (a *job*), on views of shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minato_gpu.lanes.base import (
    Blob,
    Failure,
    Item,
    Local,
    NoSample,
    Piece,
    Stored,
    StoredSample,
    reraise,
    stored_part,
)
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.samples import OutputBatch, TicketId, Value
from minato_gpu.scheduling.messages import Compose
from minato_gpu.scheduling.spans import TicketSpan, number_at, serials, singles, tickets, without
from minato_gpu.window.host_memory import HostMemoryAccount
from minato_gpu.window.loading import Loading
from minato_gpu.window.records import Batch, Record, Window
from minato_gpu.window.samples import Samples


class Assembly:
    """Holds samples in shared memory until their batch is delivered."""

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
        """``stacks``: batches are what ``default_collate`` makes of the samples, so rows can be stacked in place.

        ``joins_whole``: a batch whose composition is settled and whose samples one worker prepares may be collated
        there. ``items``: each sample is a batch by itself, which its worker has collated; a batch here is several
        of them in sequence. ``loading``: batches go to a device. ``skips``: a batch is delivered without the samples
        that failed.
        """
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
        """Admits a place to the window. Places come in rising order of serials."""
        record.marks = self._completions.reserve(record.rows)
        self.window.admit(record)
        if self.loading is not None:
            self.loading.admit(record)

    @property
    def needs_jobs(self) -> bool:
        """True if a worker may have to join batches, or to stack them from what is not in rows yet."""
        return self.samples.layout is None and not self._items

    def pieces(self, spans: Iterable[TicketSpan], *, inspect: bool) -> tuple[Piece, ...]:
        """Returns a task's tickets: keys, and the rows for their samples (unless the task is only to ``inspect``
        them)."""
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
            position=positions[0],
            keys=record.keys if complete else record.keys[a:b],
            occurrences=None if record.occurrences is None else record.occurrences[a:b],
            slab=-1 if empty else record.slab,
            rows=record.rows,
            row=a,
            joins=(complete and self._joins_whole and record.slab < 0) or empty,
            sources=sources,
            positions=None if isinstance(positions, range) else positions,
            marks=record.marks + a,
        )

    # --- batches -------------------------------------------------------------------------------------------

    def compose(self, compose: Compose) -> bool:
        """Makes a batch of these samples, and finishes it if it can be; returns whether a job must join it (see
        ``stored``)."""
        number = compose.order - self.window.at(compose.spans[0][0]).begins
        batch = self._batches[compose.order] = Batch(compose.spans, compose.order, number)
        if self._settle(batch, sorted(compose.failed)):
            return False
        if self._items:
            self._compose_items(batch)
            return False
        if self.samples.in_rows(batch.spans):
            self.samples.stack(batch)
            batch.ready = batch.load is None
            self.taken(batch.spans)
            return False
        batch.nbytes = self.samples.nbytes(batch.spans)
        return True

    def _settle(self, batch: Batch, failed: Sequence[TicketId]) -> bool:
        """Finishes the batch if it can be.

        Leaves failed samples out, or takes in the batch's error or what a worker has joined.

        Returns whether it is finished; else it must still be stacked or joined. ``failed``: its failed samples.
        """
        if self._skips and failed:
            items = [self._failure_of(serial) for serial in failed]
            if not any(item.collated for item in items):  # else it is the batch itself that failed
                self._leave_out(batch, failed, items)
                failed = ()
            if not batch.size:
                batch.ready = True
                return True
        if self._skips:
            batch.good = self.window.ticket(TicketId(batch.spans[-1][1] - 1))
        if failed:
            batch.failure, batch.ready, batch.failed = self._failure_of(min(failed)), True, len(failed)
            batch.nbytes = self.samples.nbytes(batch.spans)
            self._drop(batch.spans)
            return True
        first = batch.spans[0][0]
        stored = self.window.at(first).items
        item = stored.get(first)
        if self._items or not isinstance(item, (Blob, Local)) or not item.collated:
            return False
        del stored[first]  # the batch owns it now: its place, which may stay in the window, must not free it
        self.taken(batch.spans)
        self._came(batch, item)
        return True

    def _compose_items(self, batch: Batch) -> None:
        """Makes a batch of consecutive samples. They are registered as loaned (see ``_came``)."""
        for serial in tickets(batch.spans):
            item = self.window.at(serial).items.pop(serial)
            assert isinstance(item, (Blob, Local))
            batch.nbytes += item.nbytes
            batch.items.append(self.holdings.lend(item))
        batch.ready, batch.orders = True, batch.size
        self.taken(batch.spans)
        first = batch.spans[0][0]
        batch.dealt = ((first, TicketId(first + 1)),)

    def _leave_out(self, batch: Batch, holes: Sequence[TicketId], bad: Sequence[Failure]) -> None:
        """Leaves the failed samples ``holes`` out of the batch; ``bad`` says why, in the same order."""
        batch.spans = tuple(without(batch.spans, singles(holes)))
        batch.bad += bad
        batch.size -= len(bad)
        self._drop(tuple(singles(holes)))

    def spans(self, order: OutputBatch) -> tuple[TicketSpan, ...]:
        """Returns the tickets of a composed batch."""
        return self._batches[order].spans

    def stored(self, spans: tuple[TicketSpan, ...]) -> list[StoredSample]:
        """Returns where each sample of a batch is stored, for the job that joins them.

        Raises the error if samples cannot be copied from a device to the host.
        """
        if self.loading is not None:
            self.samples.bring_to_host(self.window.parts(spans))
        return [self.samples.stored_sample(serial) for serial in tickets(spans)]

    def joined(self, order: OutputBatch, items: Sequence[Item]) -> None:
        """Takes in the result of a batch's job. ``items``: one for each of its samples. The first is the joined batch,
        or its error; a sample's own Failure stands in that sample's place; the others are None."""
        batch = self._batches[order]
        self.holdings.bytes -= batch.nbytes
        batch.nbytes, failed = 0, list[TicketId]()
        self.holdings.count(sum(item.nbytes for item in items if item is not None))
        for serial, item in zip(tickets(batch.spans), items, strict=True):
            self._put(serial, item)
            if isinstance(item, Failure):
                failed.append(serial)
        done = self._settle(batch, failed)
        assert done, f"batch {order} was not joined"
        batch.nbytes = batch.nbytes if batch.failure is None else 0

    def _put(self, serial: TicketId, item: Item) -> None:
        """Replaces what is stored of a sample, which is released; None: nothing is stored any more."""
        items = self.window.at(serial).items
        self.holdings.release(items.pop(serial, None))
        if item is not None:
            items[serial] = item

    def give_up(self, order: OutputBatch, offset: int, failed: Failure) -> bool:
        """Handles a job that cannot prepare its sample number ``offset``, or cannot join its batch.

        Returns whether it is to go on without that sample.
        """
        batch = self._batches[order]
        if failed.collated or not self._skips:
            items: list[Item] = [None] * max(1, batch.size)
            items[offset] = failed
            self.joined(order, items)
            return False
        serial = number_at(batch.spans, offset)
        self._put(serial, failed)
        self._leave_out(batch, [serial], [failed])
        if not batch.size:
            self.holdings.bytes -= batch.nbytes
            batch.nbytes, batch.ready = 0, True
        return bool(batch.size)

    def _came(self, batch: Batch, item: Stored) -> None:
        """Takes in a batch that a worker has joined, and registers its blocks as loaned before it leaves the window.

        Otherwise, if its worker died in between, the replacement would reuse the memory.
        """
        batch.nbytes = item.nbytes
        lent = self.holdings.lend(item)
        if self.loading is None:
            batch.lent, batch.ready = lent, True
        else:
            self.loading.value(batch, lent)

    def ready(self, order: OutputBatch) -> bool:
        """Returns whether the batch can be taken."""
        batch = self._batches.get(order)
        return batch is not None and (batch.ready or (batch.load is not None and batch.load.issued))

    def make_room(self) -> None:
        """Moves samples that are in no batch yet off a device that has no memory for the next batch."""
        ways = () if self.loading is None else self.loading.transfers
        for transfers in (each for each in ways if each.wants_room):
            try:
                parts = ((record, record.first, record.end) for record in self.window.places)
                self.samples.bring_to_host(parts, transfers.accelerator)
                for other in {*ways} - {transfers}:  # samples that this device has prepared for their batches
                    other.evict_samples()
            finally:
                transfers.room_made()

    def waiting(self, *, waits: bool) -> None:
        """Sets whether the consumer waits for a batch that is not ready."""
        if self.loading is not None:
            self.loading.waiting(waits=waits)

    def expect(self, order: OutputBatch, begins: OutputBatch) -> None:
        """Sets the batch that the consumer takes next; ``begins`` is the order of its epoch's first one."""
        if self.loading is not None:
            self.loading.expect(order, begins)

    def take(self, order: OutputBatch) -> Batch:
        """Removes a batch from the window; its memory is the consumer's from now on.

        The thread that loads to a device is told which batch comes next.
        """
        batch = self._batches.pop(order)
        self.holdings.bytes -= batch.nbytes
        if self.loading is not None:
            self.loading.leave(batch)
            self.loading.expect(OutputBatch(order + 1), OutputBatch(batch.order - batch.number))
        return batch

    def value(self, batch: Batch) -> Value:
        """Returns the batch as the consumer sees it, safe on the calling thread's current stream. It must be ready, and
        none of ``items``, which are handed over one by one.

        Raises the sample's or the collate function's own error.
        """
        if batch.failure is not None:
            reraise(batch.failure.error)
        assert batch.lent is not None
        return batch.lent()

    def clear(self) -> tuple[list[int], list[object]]:
        """Forgets every ticket and batch.

        Returns their blocks of marks, to be given back, and what owns their memory, which is free once nobody refers to
        it.
        """
        memory: list[object] = [self.holdings.lend(blob) for blob in self._blobs()]
        memory += [record.memory for record in self.window.places]
        marks = [record.marks for record in self.window.places]
        self.window.clear()
        if self.loading is not None:
            for batch in self._batches.values():
                self.loading.leave(batch)
        self._batches, self.holdings.bytes = {}, 0
        return marks, memory

    def bury_worker(self, owner: int) -> list[tuple[int, int]]:
        """Handles the death of a worker: blocks of its arena that consumers release later are not reported to it any
        more.

        Returns its blocks (offset, bytes) in use.
        """
        lent = self.holdings.bury(owner)
        return [block for blob in self._blobs() if blob.worker == owner for block in blob.blocks] + lent

    def _blobs(self) -> list[Blob]:
        """Returns the blobs in workers' arenas of tickets in the window. (Those of batches are loaned.)"""
        records = self.window.places
        items = (item for record in records for item in record.items.values())
        sources = (stored_part(item) for record in records for item in record.sources.values())
        return [item for item in (*items, *sources) if isinstance(item, Blob)]

    # --- inside --------------------------------------------------------------------------------------------

    def _failure_of(self, serial: TicketId) -> Failure:
        item = self.window.at(serial).items[serial]
        assert isinstance(item, Failure)
        return item

    def _drop(self, spans: tuple[TicketSpan, ...]) -> None:
        """Frees the stored samples of a batch that has failed, or those that are left out of a batch."""
        for serial in tickets(spans):
            self.holdings.release(self.window.at(serial).items.pop(serial, None))
        self.taken(spans)

    def taken(self, spans: Iterable[TicketSpan]) -> None:
        """Notes that a batch has taken these samples; removes places that are used up."""
        for record, lo, hi in self.window.parts(spans):
            record.left -= hi - lo
            if record.left == 0:
                self.window.remove(record)
                self._completions.give_back(record.marks)
