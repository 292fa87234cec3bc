"""Samples of the tickets in the window: rows of slabs, or where else lanes have stored them, and their host reads.

Rows are samples that ``default_collate`` would stack, and are in their batch's memory from the start. Each place of the
sampler's order gets a slab, once the samples' layout is known, and workers write their rows into it; a batch that has
the sampler's composition *is* its slab and is handed over without a copy. A batch composed out of order is gathered
from the rows of several slabs.

Decision: a row is fixed when its ticket is dispatched, not when the sample is ready. Handing out rows at completion
would save the gathering of late batches, and cost every sample a decision in shared memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from minato_gpu.device.accelerator import Accelerator
from minato_gpu.lanes.base import (
    Blob,
    Extra,
    Failure,
    Handed,
    HostRead,
    Item,
    Local,
    Resident,
    Row,
    StoredSample,
    stored_part,
)
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.layout import Layout, Mismatch, Views
from minato_gpu.samples import Origin, TicketId, Value
from minato_gpu.scheduling.spans import TicketSpan, count, serials, tickets
from minato_gpu.window.host_memory import HostMemoryAccount
from minato_gpu.window.loading import Loading, Part
from minato_gpu.window.records import Batch, Record, Window


class Arrived(NamedTuple):
    """The outcome of samples that lanes have reported; those that failed or go on by their offset in the report."""

    nbytes: int  # bytes of the samples that are ready
    failed: list[int]
    handed: list[tuple[int, int]]  # samples that another lane continues, each with the stage
    held: int  # bytes of the fields that they are continued from


class Samples:
    """The samples of one loader's window.

    ``stacks``: samples may be rows at all. ``loading``: the way of batches to devices; None: they stay on the host.
    """

    def __init__(
        self,
        links: WorkerChannels,
        window: Window,
        holdings: HostMemoryAccount,
        *,
        stacks: bool,
        loading: Loading | None = None,
    ) -> None:
        self.layout: Layout | None = None
        self.layout_bytes: bytes | None = b"" if stacks else None  # for tasks; b"": not known yet; None: no rows
        self.row_bytes = 0
        self.stored_nowhere = False  # a sample could not be pickled: whoever joins a batch prepares its samples
        self._links = links
        self._window = window
        self._holdings = holdings
        self._loading = loading
        self._store = Store(-1, links)
        self._inspects = False  # there are stored host reads, or fields that another lane continues from

    # --- on their way into the window --------------------------------------------------------------------------

    def learn(self, layout: bytes) -> None:
        """Learns the layout, pickled, from the first sample that a worker has described; does nothing later, or where
        samples may not be rows. Empty: samples cannot be stacked in place."""
        if self.layout_bytes == b"":
            self.layout_bytes = layout or None
            if layout:
                self.layout = pickle.loads(layout)
                self.row_bytes = sum(leaf.nbytes for leaf in self.layout.leaves)

    def give_slab(self, record: Record) -> None:
        """Gives the place a slab, if the layout is known and it has none."""
        if record.slab < 0 and self.layout is not None:
            record.slab, record.memory = self._allocate(record.rows)

    def _allocate(self, rows: int) -> tuple[int, NDArray[np.uint8]]:
        assert self.layout is not None
        return self._links.loans.allocate(self._links.engine_arena, self.layout.offsets(rows)[1])

    def arrived(self, spans: Sequence[TicketSpan], items: Sequence[Item] | None) -> Arrived:
        """Takes in samples that lanes have reported, in this order, and drops their host reads.

        Of a sample that is handed over to another lane the fields are kept, as a host read; their bytes count as
        ``held`` only. ``items``: one for each sample, or None if all are plain rows.
        """
        self.used(spans)
        failed: list[int] = []
        handed: list[tuple[int, int]] = []
        rows, nbytes, held = count(spans), 0, 0
        pairs = () if items is None else zip(tickets(spans), items, strict=True)
        for offset, (serial, item) in enumerate(pairs):
            if isinstance(item, Handed):
                rows -= 1
                held += item.nbytes
                handed.append((offset, item.stage))
                self._inspects = True
                self._window.at(serial).sources[serial] = item
            elif item is not None:
                rows -= not isinstance(item, Extra)
                nbytes += item.nbytes
                self._window.at(serial).items[serial] = item
                if isinstance(item, Failure):
                    failed.append(offset)
        nbytes += rows * self.row_bytes
        self._holdings.count(nbytes)
        return Arrived(nbytes, failed, handed, held)

    # --- what was read for them --------------------------------------------------------------------------------

    def origin(self, serial: TicketId, stage: str | None, lane: str) -> Origin:
        """Returns the place of a failure at this ticket; its path is the field ``path`` of a stored host read."""
        record, path = self._window.at(serial), None
        source, ticket = stored_part(record.sources.get(serial)), record.ticket(serial)
        if isinstance(source, (Blob, Local)):
            fields, _ = self._store.get(source)
            path = str(fields["path"]) if "path" in fields else None
        return Origin(ticket.epoch, ticket.position, ticket.index, stage, lane, path)

    def inspected(self, spans: Iterable[TicketSpan], items: Sequence[HostRead]) -> None:
        """Notes the host reads of these tickets, in their order: where they are stored, or a Failure."""
        self._inspects, rest = True, iter(items)
        for record, lo, hi in self._window.parts(spans):
            record.sources.update(zip(serials(lo, hi), rest, strict=False))

    def used(self, spans: Iterable[TicketSpan]) -> None:
        """Drops the host reads of these tickets."""
        if not self._inspects:
            return
        for serial in tickets(spans):
            source = self._window.at(serial).sources.pop(serial, None)
            if source is not None:
                self._holdings.release(source)

    # --- where they are stored ---------------------------------------------------------------------------------

    def nbytes(self, spans: Iterable[TicketSpan]) -> int:
        """Returns the bytes of these samples."""
        items = [self._window.at(serial).items.get(serial) for serial in tickets(spans)]
        return sum(self.row_bytes if item is None or isinstance(item, Extra) else item.nbytes for item in items)

    def stored_sample(self, serial: TicketId) -> StoredSample:
        """Returns where a sample is stored; None if nowhere, because it could not be pickled.

        None also sets ``stored_nowhere`` for the whole window: whoever joins a batch then prepares its samples.
        """
        record = self._window.at(serial)
        item = record.items.get(serial)
        if isinstance(item, (Blob, Local)):
            return item
        if record.slab < 0:
            self.stored_nowhere = True
            return None
        assert self.layout_bytes is not None
        objects = item.objects if isinstance(item, Extra) else None
        return Row(record.slab, record.rows, serial - record.first, self.layout_bytes, objects)

    def _views(self, record: Record) -> Views:
        """Returns the place's slab as arrays, one for each leaf."""
        assert self.layout is not None
        return self.layout.views(self._links.buffer(-1), record.slab, record.rows)

    def bring_to_host(self, parts: Iterable[Part], accelerator: Accelerator | None = None) -> None:
        """Moves samples of these parts of places from devices (only from ``accelerator``, if given) to their rows.

        They are no longer on the device: nobody may write the row again while a worker reads it. Raises the device's
        error.
        """
        assert self._loading is not None
        found: list[tuple[Record, TicketId, Resident]] = []
        for record, lo, hi in parts:
            there = record.residents(lo, hi)
            found += [(record, *each) for each in there if accelerator in (None, each[1].made.accelerator)]
        views = {record.first: self._views(record) for record, _, _ in found}
        self._loading.fetch([(views[record.first], serial - record.first, item) for record, serial, item in found])
        for record, serial, item in found:
            del record.items[serial]
            if item.objects:
                record.items[serial] = Extra(item.objects)

    def in_rows(self, spans: Iterable[TicketSpan]) -> bool:
        """Returns whether all these samples are rows.

        Samples stored before the layout was known are written into their rows here: only the first few of a run, for
        which a job on a worker would do, but may wait behind a slow sample.
        """
        if self.layout is None:
            return False
        for record, lo, hi in self._window.parts(spans):
            self.give_slab(record)
            items = [(serial, record.items.get(serial)) for serial in serials(lo, hi)] if record.items else []
            others = [(serial, item) for serial, item in items if isinstance(item, (Blob, Local))]
            if not all(self._into_row(record, serial, item) for serial, item in others):
                return False
        return True

    def _into_row(self, record: Record, serial: TicketId, item: Blob | Local) -> bool:
        """Writes a sample into its row; returns whether it is a row from now on."""
        assert self.layout is not None
        try:
            objects = self.layout.writer(self._views(record))(serial - record.first, self._store.get(item))
        except Mismatch:
            return False
        self._holdings.count(self.row_bytes - item.nbytes)
        self._holdings.release(item)
        del record.items[serial]
        if objects is not None:
            record.items[serial] = Extra(objects)
        return True

    # --- batches -----------------------------------------------------------------------------------------------

    def stack(self, batch: Batch) -> None:
        """Makes the batch, whose samples must all be rows: of the slab itself, or of a gathered copy. Where batches go
        to a device, begins to load the rows there instead."""
        layout, size = self.layout, batch.size
        assert layout is not None
        parts = list(self._window.parts(batch.spans))
        objects: list[list[Value]] = []
        if layout.objects:
            extras = [(cast("dict[TicketId, Extra]", record.items), lo, hi) for record, lo, hi in parts]
            objects = [items[serial].objects for items, lo, hi in extras for serial in serials(lo, hi)]
        batch.nbytes = size * self.row_bytes
        if self._loading is not None:
            self._loading.rows(batch, layout, parts, objects)
            return
        record, lo, hi = parts[0]
        owner = record.memory if hi - lo == size == record.rows else self._gathered(parts, layout, size)
        assert owner is not None
        batch.lent = partial(layout.batch, owner, size, objects)

    def _gathered(self, parts: list[Part], layout: Layout, size: int) -> NDArray[np.uint8]:
        slab, owner = self._allocate(size)
        target = layout.views(self._links.buffer(-1), slab, size)
        at = 0
        for record, lo, hi in parts:
            a, rows = lo - record.first, hi - lo
            for into, source in zip(target, self._views(record), strict=True):
                if into is not None and source is not None:
                    np.copyto(into[at : at + rows], source[a : a + rows])
            at += rows
        return owner
