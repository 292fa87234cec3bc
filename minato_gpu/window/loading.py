"""Sends composed batches to devices: which rows come from which slab, and which are on the device already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from minato_gpu.device.accelerator import Accelerator, Stream
from minato_gpu.device.collated import ValueLoad
from minato_gpu.device.copies import CopyRange
from minato_gpu.device.loads import DeviceRow, Load, RowsLoad
from minato_gpu.device.pinned_memory import PinnedArena
from minato_gpu.device.staging import Download
from minato_gpu.device.transfers import Transfers
from minato_gpu.lanes.base import Failure, Resident
from minato_gpu.memory.layout import Layout, Views
from minato_gpu.samples import JSON, OutputBatch, TicketId, Value
from minato_gpu.scheduling.spans import singles, without
from minato_gpu.window.records import Batch, Record

Part = tuple[Record, TicketId, TicketId]


class Loading:
    """Sends batch number k of an epoch to device number k modulo the number of devices.

    ``transfers`` are by the device's number; two numbers may stand for one device, and then share them.
    """

    def __init__(self, transfers: Sequence[Transfers], host: PinnedArena) -> None:
        self.transfers = tuple(transfers)
        self.host = host
        self._streams: dict[Accelerator, Stream] = {}  # for what is brought to the host

    def _of(self, batch: Batch) -> Transfers:
        """Returns the transfers of the batch's device."""
        return self.transfers[batch.number % len(self.transfers)]

    def admit(self, record: Record) -> None:
        """Notes that a place enters the window: a batch may have as many rows as that has."""
        for transfers in self.transfers:
            transfers.rows = max(transfers.rows, record.place_rows)

    def rows(self, batch: Batch, layout: Layout, parts: Sequence[Part], objects: list[list[Value]]) -> None:
        """Submits the load of a batch whose samples are rows of their places' slabs, or were made on the device."""
        self._submit(batch, _rows_load(layout, batch.size, parts, objects))

    def value(self, batch: Batch, make: Callable[[], Value]) -> None:
        """Submits the load of a batch that a worker has joined, which ``make`` returns."""
        self._submit(batch, ValueLoad(make, batch.nbytes))

    def _submit(self, batch: Batch, load: Load) -> None:
        transfers = self._of(batch)
        batch.load, batch.lent = load, partial(load.hand_over, transfers.accelerator)
        load.order = batch.order
        transfers.submit(load)

    def expect(self, order: OutputBatch, begins: OutputBatch) -> None:
        """Sets the batch that the consumer takes next; ``begins`` is the order of its epoch's first one."""
        turns: dict[Transfers, OutputBatch] = {}
        for number, transfers in enumerate(self.transfers):
            turn = OutputBatch(order + (number - order + begins) % len(self.transfers))
            turns[transfers] = min(turn, turns.get(transfers, turn))
        for transfers, turn in turns.items():
            transfers.expect(order, turn)

    def waiting(self, *, waits: bool) -> None:
        """Sets whether the consumer waits for a batch."""
        for transfers in self.transfers:
            transfers.waiting(waits=waits)

    def leave(self, batch: Batch) -> None:
        """Drops a batch that is taken, or that nobody wants any more; an error of its load becomes its failure."""
        load = batch.load
        if load is not None:
            self._of(batch).leave(load)
            if load.error is not None:
                batch.failure = Failure(load.error, collated=True)

    def fetch(self, samples: Sequence[tuple[Views, int, Resident]]) -> None:
        """Copies samples from devices to the host. ``samples``: views of a slab, the row in them, and what is on the
        device.

        Waits for each device once, on a stream on which nothing else waits.
        """
        for accelerator in {item.made.accelerator for _, _, item in samples}:
            here = [one for one in samples if one[2].made.accelerator is accelerator]
            leaves = [(views[leaf], row, tensor) for views, row, item in here for leaf, tensor in item.leaves.items()]
            if accelerator not in self._streams:
                self._streams[accelerator] = accelerator.stream()
            with accelerator.running(self._streams[accelerator]):
                for made in {item.made for _, _, item in here}:
                    accelerator.wait(made.event)
                home, event = Download(accelerator, [tensor for _, _, tensor in leaves]), accelerator.event()
            event.synchronize()
            for (into, row, _), value in zip(leaves, home.values(), strict=True):
                assert into is not None
                into[row] = value

    # --- all of them -----------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Releases what finished loads have read. Never waits."""
        for transfers in self.transfers:
            transfers.sweep()

    def stats(self) -> JSON:
        """Returns counters as plain data; a list if several devices are named."""
        found = [transfers.stats() for transfers in self.transfers]
        return found if len(found) > 1 else found[0]

    def close(self) -> None:
        """Waits for what has been issued, then unpins memory. Batches that the consumer holds live on. Idempotent."""
        for transfers in self.transfers:
            transfers.close()
        self.host.close()


def _rows_load(layout: Layout, size: int, parts: Sequence[Part], objects: list[list[Value]]) -> RowsLoad:
    """Returns a load of rows.

    It is a function so that, once the load is submitted, nothing else keeps what is on the device.
    """
    runs: list[CopyRange] = []
    on_device: list[DeviceRow] = []
    at, offsets = 0, layout.offsets(size)[0]
    for record, lo, hi in parts:
        residents = record.residents(lo, hi)
        for serial, _ in residents:
            del record.items[serial]  # the load has it: a place that is not used up must not keep device memory
        sources = layout.offsets(record.rows)[0]
        for number, leaf in enumerate(layout.leaves):
            if leaf.nbytes == 0 or leaf.kind == "object":
                continue
            begin = record.slab + sources[number] - record.first * leaf.nbytes
            way = _Way(begin, offsets[number] + (at - lo) * leaf.nbytes, leaf.nbytes)
            there = [(serial, item) for serial, item in residents if number in item.leaves]
            if len(there) < hi - lo:
                runs += [way.run(a, b) for a, b in without([(lo, hi)], singles(serial for serial, _ in there))]
            for serial, item in there:
                row, run = at + serial - lo, way.run(serial, serial + 1)
                on_device.append(DeviceRow(item.made, number, row, item.leaves[number], run))
        at += hi - lo
    slabs: list[object] = [record.memory for record, _, _ in parts]
    return RowsLoad(layout, size, objects, runs, on_device, slabs)


class _Way(NamedTuple):
    """Maps a place's rows of one leaf to the batch's: where serial 0 would be on both sides, and the bytes of a row."""

    source: int
    target: int
    row: int

    def run(self, lo: int, hi: int) -> CopyRange:
        """Returns the copy of the rows of these serials."""
        return CopyRange(self.source + lo * self.row, self.target + lo * self.row, (hi - lo) * self.row)
