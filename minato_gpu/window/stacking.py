"""Rows of slabs: samples that ``default_collate`` would stack lie in their batch's memory from the start.

Each place of the sampler's order gets a slab, once the samples' layout is known, and workers write their rows into
it; a batch that has the sampler's composition *is* its slab and is handed over without a copy. A batch composed out
of order is gathered from the rows of several slabs.

Decision: a row is fixed when its ticket is dispatched, not when the sample is ready. Handing out rows at completion
would save the gathering of late batches, and cost every sample a decision in shared memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from minato_gpu.lanes.base import Blob, Extra, Laid, Local, Resident, Row, Unshippable
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.accelerator import Accelerator
from minato_gpu.memory.layout import Layout, Mismatch, Views
from minato_gpu.samples import TicketId, Value
from minato_gpu.scheduling.messages import TicketSpan, serials
from minato_gpu.window.loading import Loading, Part
from minato_gpu.window.records import Batch, Record, Window


class Stacking:
    """The slabs of one loader. ``stacks``: whether rows may be used at all; ``loading``: batches go to a device."""

    def __init__(
        self,
        links: WorkerChannels,
        window: Window,
        store: Store,
        *,
        stacks: bool,
        loading: Loading | None = None,
    ) -> None:
        self._loading = loading
        self.layout: Layout | None = None
        self.layout_bytes: bytes | None = b"" if stacks else None
        self.row_bytes = 0
        self._links = links
        self._window = window
        self._store = store

    def learn(self, layout: bytes) -> None:
        """A worker has described the first sample (empty: it cannot be stacked in place)."""
        if self.layout_bytes == b"":
            self.layout_bytes = layout or None
            if layout:
                self.layout = pickle.loads(layout)
                self.row_bytes = sum(leaf.nbytes for leaf in self.layout.leaves)

    def give_slab(self, record: Record) -> None:
        """The place gets its slab, if the layout is known and it has none."""
        if record.slab < 0 and self.layout is not None:
            record.slab, record.memory = self._allocate(self.layout.offsets(record.rows)[1])

    def _allocate(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        return self._links.loans.allocate(self._links.engine_arena, nbytes)

    def row(self, record: Record, serial: TicketId, objects: list[Value] | None) -> Row:
        """Where a sample lies."""
        assert self.layout_bytes is not None
        return Row(record.slab, record.rows, serial - record.first, self.layout_bytes, objects)

    def row_views(self, record: Record) -> Views:
        """The place's slab as arrays, one for each leaf."""
        assert self.layout is not None
        return self.layout.views(self._links.buffer(-1), record.slab, record.rows)

    def bring_to_host(self, parts: Iterable[Part], accelerator: Accelerator | None = None) -> None:
        """Samples of these parts of places that are on a device, or on this one, go to their rows. They are on it no
        more: nobody is to write the row again while a worker reads it."""
        assert self._loading is not None
        found: list[tuple[Record, TicketId, Resident]] = []
        for record, lo, hi in parts:
            items = ((serial, record.items.get(serial)) for serial in serials(lo, hi))
            there = [(record, serial, item) for serial, item in items if isinstance(item, Resident)]
            found += [each for each in there if accelerator in (None, each[2].made.accelerator)]
        views = {record.first: self.row_views(record) for record, _, _ in found}
        self._loading.fetch([(views[record.first], serial - record.first, item) for record, serial, item in found])
        for record, serial, item in found:
            del record.items[serial]
            if item.objects:
                record.items[serial] = Extra(item.objects)

    # --- batches -------------------------------------------------------------------------------------------

    def in_rows(self, spans: Iterable[TicketSpan]) -> bool:
        """Whether all these samples are rows."""
        for record, lo, hi in self._window.parts(spans):
            if record.slab < 0:
                return False
            if record.items and any(
                not isinstance(record.items.get(serial, None), (Extra, type(None))) for serial in serials(lo, hi)
            ):
                return False
        return True

    def fill(self, spans: Iterable[TicketSpan]) -> tuple[bool, list[Laid]]:
        """Bring samples that were laid down before the layout was known into their rows.

        Returns whether all fitted, and the references that are no longer needed. Only the first few samples of a run
        come here: a job on a worker would do, but may wait behind a slow sample.
        """
        layout = self.layout
        assert layout is not None
        moved: list[Laid] = []
        for record, lo, hi in self._window.parts(spans):
            for serial in serials(lo, hi):
                item = record.items.get(serial)
                if isinstance(item, Unshippable):
                    return False, moved
                if isinstance(item, (Blob, Local)):
                    self.give_slab(record)
                    write = layout.writer(layout.views(self._links.buffer(-1), record.slab, record.rows))
                    try:
                        objects = write(serial - record.first, self._store.get(item))
                    except Mismatch:
                        return False, moved
                    moved.append(item)
                    del record.items[serial]
                    if objects is not None:
                        record.items[serial] = Extra(objects)
        return True, moved

    def stack(self, batch: Batch) -> None:
        """Make the batch from rows: the slab itself, or a gathered copy."""
        layout = self.layout
        assert layout is not None
        parts = list(self._window.parts(batch.spans))
        if layout.objects:
            extras = [(cast("dict[TicketId, Extra]", record.items), lo, hi) for record, lo, hi in parts]
            batch.objects = [items[serial].objects for items, lo, hi in extras for serial in serials(lo, hi)]
        if self._loading is not None:
            batch.nbytes = batch.size * self.row_bytes
            self._loading.rows(batch, layout, parts)
            return
        record, lo, hi = parts[0]
        whole = hi - lo == batch.size == record.rows
        batch.owner = record.memory if whole else self._gathered(parts, layout, batch.size)
        batch.nbytes = batch.size * self.row_bytes

    def _gathered(self, parts: list[Part], layout: Layout, size: int) -> NDArray[np.uint8]:
        buffer = self._links.buffer(-1)
        slab, owner = self._allocate(layout.offsets(size)[1])
        target = layout.views(buffer, slab, size)
        at = 0
        for record, lo, hi in parts:
            source = layout.views(buffer, record.slab, record.rows)
            a, count = lo - record.first, hi - lo
            for into, rows in zip(target, source, strict=True):
                if into is not None and rows is not None:
                    np.copyto(into[at : at + count], rows[a : a + count])
            at += count
        return owner

    def value(self, batch: Batch) -> Value:
        """The stacked batch as ``default_collate`` would return it."""
        assert self.layout is not None and batch.owner is not None
        return self.layout.batch(batch.owner, batch.size, batch.objects)
