"""From composed batches to loads: which rows of a batch come from which slab, and which lie on the device already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minato_gpu.lanes.base import Failure, Resident
from minato_gpu.memory.accelerator import Accelerator, Stream
from minato_gpu.memory.copies import CopyRange
from minato_gpu.memory.host import Host
from minato_gpu.memory.layout import Layout, Views
from minato_gpu.memory.loads import DeviceRows, Load, Made, RowsLoad
from minato_gpu.memory.staging import Download
from minato_gpu.memory.transfers import Transfers
from minato_gpu.memory.values import ValueLoad
from minato_gpu.samples import JSON, OutputBatch, TicketId, Value
from minato_gpu.scheduling.messages import serials
from minato_gpu.spans import singles, without
from minato_gpu.window.records import Batch, Record

Part = tuple[Record, TicketId, TicketId]


class Loading:
    """The assembly's side of the way to devices: batch number k of an epoch goes to device number k modulo theirs.

    ``transfers``: by the device's number; two numbers may stand for one device, and then have one way there.
    """

    def __init__(self, transfers: Sequence[Transfers], host: Host) -> None:
        self.transfers = tuple(transfers)
        self.host = host
        self._streams: dict[Accelerator, Stream] = {}  # for what is brought to the host

    def _of(self, batch: Batch) -> Transfers:
        """The way to the batch's device."""
        return self.transfers[batch.number % len(self.transfers)]

    def admit(self, record: Record) -> None:
        """A place enters the window: batches will have as many rows as it, of which a record may be a piece."""
        for transfers in self.transfers:
            transfers.rows = max(transfers.rows, record.place_rows)

    def rows(self, batch: Batch, layout: Layout, parts: Sequence[Part]) -> None:
        """Load a batch whose samples are rows of their places' slabs, or made on the device."""
        found = _Rows(layout, batch.size)
        for part in parts:
            found.add(*part)
        slabs: list[object] = [record.memory for record, _, _ in parts]
        on_device = list(found.on_device.values())
        self._submit(batch, RowsLoad(layout, batch.size, batch.objects, found.runs, on_device, found.made, slabs))

    def value(self, batch: Batch, make: Callable[[], Value]) -> None:
        """Load a batch that somebody has joined; ``make`` returns it."""
        self._submit(batch, ValueLoad(make, batch.nbytes))

    def _submit(self, batch: Batch, load: Load) -> None:
        batch.load = load
        load.order = batch.order
        self._of(batch).submit(load)

    def expect(self, order: OutputBatch, begins: OutputBatch) -> None:
        """The consumer takes batch ``order`` next; ``begins``: the order of its epoch's first one."""
        turns: dict[Transfers, OutputBatch] = {}
        for number, transfers in enumerate(self.transfers):
            turn = OutputBatch(order + (number - order + begins) % len(self.transfers))
            turns[transfers] = min(turn, turns.get(transfers, turn))
        for transfers, turn in turns.items():
            transfers.expect(order, turn)

    def leave(self, batch: Batch) -> None:
        """The batch is taken, or nobody wants it any more."""
        load = batch.load
        if load is not None:
            self._of(batch).leave(load)
            if load.error is not None:
                batch.failure = Failure(load.error, collated=True)

    def hand_over(self, batch: Batch) -> Value:
        """The batch, safe on the calling thread's current stream."""
        assert batch.load is not None
        return batch.load.hand_over(self._of(batch).accelerator)

    def fetch(self, samples: Sequence[tuple[Views, int, Resident]]) -> None:
        """Bring samples from devices into rows of these views. Waits for each device once, on a stream on which nothing
        else waits."""
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
        """Let go of what loads that are through have read; never waits."""
        for transfers in self.transfers:
            transfers.sweep()

    def stats(self) -> JSON:
        """Counters as plain data: of the device, or of each, in a list, where several are named."""
        found = [transfers.stats() for transfers in self.transfers]
        return found if len(found) > 1 else found[0]

    def close(self) -> None:
        """Wait for what has been issued, then unpin. Batches that the consumer holds live on. Idempotent."""
        for transfers in self.transfers:
            transfers.close()
        self.host.close()


class _Rows:
    """The rows of a batch as they are collected, part by part."""

    def __init__(self, layout: Layout, rows: int) -> None:
        self.runs: list[CopyRange] = []
        self.on_device: dict[int, DeviceRows] = {}
        self.made: set[Made] = set()
        self._layout = layout
        self._targets = layout.offsets(rows)[0]
        self._at = 0

    def add(self, record: Record, lo: TicketId, hi: TicketId) -> None:
        """Samples ``lo`` to ``hi`` of the place come next."""
        residents = self._residents(record, lo, hi)
        sources = self._layout.offsets(record.rows)[0]
        for number, leaf in enumerate(self._layout.leaves):
            if leaf.nbytes == 0 or leaf.kind == "object":
                continue
            source = record.slab + sources[number] - record.first * leaf.nbytes
            target = self._targets[number] + (self._at - lo) * leaf.nbytes
            for a, b in without([(lo, hi)], singles(serial for serial, item in residents if number in item.leaves)):
                self.runs.append(CopyRange(source + a * leaf.nbytes, target + a * leaf.nbytes, (b - a) * leaf.nbytes))
        self._at += hi - lo

    def _residents(self, record: Record, lo: TicketId, hi: TicketId) -> list[tuple[TicketId, Resident]]:
        if not record.items:
            return []
        items = ((serial, record.items.get(serial)) for serial in serials(lo, hi))
        found = [(serial, item) for serial, item in items if isinstance(item, Resident)]
        offsets = self._layout.offsets(record.rows)[0]
        for serial, item in found:
            del record.items[serial]  # the load has it: a place that is not used up must not keep device memory
            self.made.add(item.made)
            for number, tensor in item.leaves.items():
                rows = self.on_device.setdefault(number, DeviceRows(number, [], [], []))
                row, nbytes = self._at + serial - lo, self._layout.leaves[number].nbytes
                source = record.slab + offsets[number] + (serial - record.first) * nbytes
                rows.numbers.append(row)
                rows.sources.append(tensor)
                rows.ways.append((item.made, CopyRange(source, self._targets[number] + row * nbytes, nbytes)))
        return found
