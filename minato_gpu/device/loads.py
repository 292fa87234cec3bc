"""What is to be loaded onto the device for one batch, and how it becomes the consumer's.

A *load* is issued on the copy stream by the thread of ``transfers`` and handed to the consumer by the consumer's own
thread, which waits for nothing: its stream does, for the load's event. The batch's memory belongs to the copy stream in
torch's allocator, so the consumer's stream is recorded as its user: dropped while the consumer's kernels still read it,
it is not given to the next batch before they are through.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper

from minato_gpu.device.accelerator import Accelerator, Event
from minato_gpu.device.copies import MOST, CopyRange, plan, worth
from minato_gpu.device.pinned_memory import Host
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.loans import is_small
from minato_gpu.samples import OutputBatch, Value
from minato_gpu.slices import Slices


class Made:
    """What one micro-batch left on the device of ``accelerator``: ``event`` comes after it was made."""

    def __init__(self, event: Event | None, accelerator: Accelerator) -> None:
        self.event = event
        self.accelerator = accelerator


class DeviceRow(NamedTuple):
    """Row ``number`` of leaf ``leaf`` is this tensor, on the batch's device or on another.

    ``run``: how it would come by way of its row in the arena. ``made`` stands before ``tensor``, so that it dies after
    it: the bytes are in the account until they are free.
    """

    made: Made
    leaf: int
    number: int
    tensor: torch.Tensor
    run: CopyRange


class Port:
    """What issuing a load needs: the device, the host, slices of time of the thread that issues, and counters.

    What copies read is kept until the device is through with them. Of a load that had to be put back, those of the
    first attempt may be under way when it is issued anew or given up: so each attempt is kept by itself. ``sweep`` and
    ``wait`` may be called by any thread.
    """

    def __init__(self, accelerator: Accelerator, host: Host) -> None:
        self.accelerator = accelerator
        self.host = host
        self.slices = Slices()
        self.copies = self.gathered = 0
        self.crossed = 0  # micro-batches of other devices that a batch has taken of
        self._under_way: deque[tuple[Event | None, list[object]]] = deque()  # oldest first
        self._sweeping = threading.Lock()

    def copy(self, into: torch.Tensor, runs: Sequence[CopyRange], most: int = MOST) -> bool:
        """Fill ``into`` from the arena; False, with nothing done, when that would take more than ``most`` copies."""
        self.host.cover(max((run.source + run.nbytes for run in runs), default=0))
        planned = plan(runs, self.host.ends, most)
        if planned:
            arena = torch.from_numpy(np.frombuffer(self.host.arena.buffer, np.uint8))
            targets = [into[run.target : run.target + run.nbytes] for run in planned]
            self.accelerator.copy_all(targets, [arena[run.source : run.source + run.nbytes] for run in planned])
            self.copies += len(planned)
        return planned is not None

    def lay_down(self, fetched: NDArray[Value], offset: int) -> None:
        """Write what came from a device into the arena."""
        into = np.frombuffer(self.host.arena.buffer, np.uint8, fetched.nbytes, offset)
        np.copyto(into, np.ascontiguousarray(fetched).reshape(-1).view(np.uint8))

    def attempted(self, load: Load) -> None:
        """All or a part of a load has been issued. Where it has no event, nobody uses what was copied."""
        self._under_way.append((load.event, load.keep))
        load.keep = []

    def sweep(self) -> None:
        """Let go of what copies that are through have read; never waits."""
        over: list[object] = []  # dropped without the lock: that may run code of others
        with self._sweeping:
            while self._under_way and _through(self._under_way[0][0]):
                over.append(self._under_way.popleft())

    def wait(self) -> None:
        """Until the device is through with all of them, or says what is wrong with it: it reads no more then, and who
        issues or takes the next batch is told."""
        for event, _ in list(self._under_way):
            if event is not None:
                with contextlib.suppress(Exception):
                    event.synchronize()

    def close(self) -> None:
        """Wait, then let go of everything."""
        self.wait()
        with self._sweeping:
            over, self._under_way = self._under_way, deque()
        over.clear()


def _through(event: Event | None) -> bool:
    """Whether the event has come to pass. Where it cannot be asked, what the copies read is kept: the device's error
    may be another's, and who issues or takes the next batch is told of it."""
    try:
        return event is None or event.query()
    except Exception:
        return False


class Load:
    """One batch. ``nbytes``: of the batch on the device, ``measured``: the same, where that is only known once it is
    issued.

    ``issued``: it can be handed over, or ``error`` says why not; ``counted``: its bytes are in the account. ``keep``:
    what must live until the event of the latest attempt to issue it. ``order``: the batch's, among all of the run, set
    by who submits it.
    """

    order = OutputBatch(0)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.measured: int | None = None
        self.issued = self.counted = self.cancelled = False
        self.error: ExceptionWrapper | None = None
        self.event: Event | None = None
        self.keep: list[object] = []

    def issue(self, port: Port) -> None:
        """Issue everything on the current stream, which is the copy stream; anew where that, or its event, raised."""
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of what ``issue`` reads: there will be no other attempt."""

    def make_room(self, port: Port) -> None:
        """Let go of the device's memory before ``issue``, if that is possible. Waits on the host."""

    def unload(self, port: Port) -> None:
        """What was issued goes to the host, from where it is issued anew. Waits on the host; nobody has the batch."""
        raise NotImplementedError

    def hand_over(self, accelerator: Accelerator) -> Value:
        """The batch, for the current stream. Called once, by the consumer's thread."""
        raise NotImplementedError


def rows_bytes(layout: Layout, rows: int) -> int:
    """What a stacked batch takes on the device: its rows, and its small parts once more (see ``RowsLoad``)."""
    whole = layout.offsets(rows)[1]
    return whole + sum(leaf.nbytes * rows for leaf in layout.leaves if is_small(leaf.nbytes * rows, whole))


class RowsLoad(Load):
    """A stacked batch of ``rows`` rows, from rows of slabs and from what the device has made.

    ``runs`` lead from the arena, blocks that ``slabs`` own, into the batch.
    """

    def __init__(
        self,
        layout: Layout,
        rows: int,
        objects: list[list[Value]],
        runs: list[CopyRange],
        on_device: list[DeviceRow],
        slabs: list[object],
    ) -> None:
        super().__init__(rows_bytes(layout, rows))
        self._whole = layout.offsets(rows)[1]
        self._layout = layout
        self._rows = rows
        self._objects = objects
        self._runs = runs
        self._on_device = on_device
        self._slabs = slabs
        self._blocks: list[torch.Tensor] = []

    def issue(self, port: Port) -> None:
        """See Load. What is copied from the host comes in at most ``copies.worth`` copies."""
        accelerator = port.accelerator
        self._blocks, self.keep = [], [self._on_device, self._slabs]
        slab = accelerator.empty(self._whole)
        if not port.copy(slab, self._runs, worth(sum(run.nbytes for run in self._runs))):
            self._gather(port, slab)
        for made in {row.made for row in self._on_device}:
            assert made.event is not None
            accelerator.wait(made.event)
            port.crossed += made.accelerator is not accelerator
        blocks = [slab[at : at + nbytes] for at, nbytes in self._places()]
        for leaf in {row.leaf for row in self._on_device}:
            into = self._layout.rows_of(blocks[leaf], leaf, self._rows).unbind(0)
            there = [row for row in self._on_device if row.leaf == leaf]
            port.slices.between()
            accelerator.scatter([into[row.number] for row in there], [row.tensor for row in there])
        self._blocks = [self._apart(accelerator, block) for block in blocks]

    def forget(self) -> None:
        """See Load."""
        self._on_device, self._slabs = [], []

    def make_room(self, port: Port) -> None:
        """See Load. What the device has made goes to its rows in the arena."""
        for row in self._on_device:
            assert row.made.event is not None
            port.lay_down(row.made.accelerator.fetch(row.tensor, row.made.event), row.run.source)
            self._runs.append(row.run)
        self._runs.sort(key=lambda run: run.target)
        self._on_device = []

    def unload(self, port: Port) -> None:
        """See Load. It lies in the arena as it is on the device, in a block that only it reads."""
        assert self.event is not None
        block, slab = port.host.allocate(self._whole)
        for (at, nbytes), part in zip(self._places(), self._blocks, strict=True):
            if nbytes:
                port.lay_down(port.accelerator.fetch(part, self.event), block + at)
        self._blocks, self._runs, self._slabs = [], [CopyRange(block, 0, self._whole)], [slab]

    def _places(self) -> list[tuple[int, int]]:
        offsets, _ = self._layout.offsets(self._rows)
        return [(at, leaf.nbytes * self._rows) for at, leaf in zip(offsets, self._layout.leaves, strict=True)]

    def _gather(self, port: Port, slab: torch.Tensor) -> None:
        """Many small runs, from many slabs: joined on the host first, in a slab of their own."""
        offset, staging = port.host.allocate(self._whole)
        self.keep.append(staging)
        for run in self._runs:
            rows = np.frombuffer(port.host.arena.buffer, np.uint8, run.nbytes, run.source)
            np.copyto(staging[run.target : run.target + run.nbytes], rows)
            port.slices.between()
        port.copy(slab, [CopyRange(offset, 0, self._whole)], most=1 << 16)
        port.gathered += 1

    def _apart(self, accelerator: Accelerator, block: torch.Tensor) -> torch.Tensor:
        """Small parts get memory of their own: whoever keeps the labels does not keep the pictures."""
        if block.numel() == 0 or not is_small(block.numel(), self._whole):
            return block
        own = accelerator.empty(block.numel())
        accelerator.copy(own, block)
        return own

    def hand_over(self, accelerator: Accelerator) -> Value:
        """See Load."""
        assert self.event is not None
        accelerator.wait(self.event)
        for block in self._blocks:
            if block.numel():
                accelerator.used_here(block)
        blocks, self._blocks = self._blocks, []
        return self._layout.batch_of(blocks, self._rows, self._objects)
