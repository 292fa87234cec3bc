"""Loads: the copies that bring one batch to the device, and its hand-over to the consumer.

A ``Load`` is issued on the copy stream by the thread of ``Transfers``, and handed over by the consumer's thread. That
thread does not wait: its stream waits for the load's event. In torch's allocator the batch's memory belongs to the copy
stream, so the consumer's stream is recorded as a user: memory that the consumer drops while its kernels still read is
not reused before they end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper

from minato_gpu.device.accelerator import Accelerator, Event, HeldUntilPassed
from minato_gpu.device.copies import MOST, WORTH, CopyRange, plan
from minato_gpu.device.pinned_memory import PinnedArena
from minato_gpu.device.slices import Slices
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.loans import is_small
from minato_gpu.samples import OutputBatch, Value


class MicroBatchOutput:
    """The samples of one micro-batch on a device: ``event`` comes after they were made on ``accelerator``; None: not
    all are issued yet."""

    def __init__(self, event: Event | None, accelerator: Accelerator) -> None:
        self.event = event
        self.accelerator = accelerator


class DeviceRow(NamedTuple):
    """One leaf of one sample that is on a device already, to be copied into its row of the batch."""

    made: MicroBatchOutput  # before ``tensor``, so that it dies after it: its bytes are in the budget until then
    leaf: int  # number of the leaf
    number: int  # row of the batch
    tensor: torch.Tensor  # on the batch's device or another
    run: CopyRange  # the copy from its row in the arena, if it has to leave the device


class LoadContext:
    """Shared state of one device's loads: host arena, time slices of the issuing thread, counters, copies in flight."""

    def __init__(self, accelerator: Accelerator, host: PinnedArena) -> None:
        self.accelerator = accelerator
        self.host = host
        self.slices = Slices()
        self.copies = 0  # copies issued from the arena
        self.gathered = 0  # batches whose ranges were first joined on the host
        self.crossed = 0  # micro-batches of other devices from which batches took rows
        # What copies read. Each attempt to issue a load is held by itself, since a repeated load may have copies of its
        # first attempt in flight.
        self.held = HeldUntilPassed()

    def copy(self, into: torch.Tensor, runs: Sequence[CopyRange], most: int = MOST) -> bool:
        """Issues copies of ranges of the arena into ``into``, uint8 on the device, and pins the arena as far as they
        reach. Returns False, with nothing copied, when that takes more than ``most`` copies."""
        self.host.cover(max((run.source + run.nbytes for run in runs), default=0))
        planned = plan(runs, self.host.ends, most)
        if planned:
            arena = torch.from_numpy(np.frombuffer(self.host.arena.buffer, np.uint8))
            targets = [into[run.target : run.target + run.nbytes] for run in planned]
            self.accelerator.copy(targets, [arena[run.source : run.source + run.nbytes] for run in planned])
            self.copies += len(planned)
        return planned is not None

    def store(self, fetched: NDArray[Value], offset: int) -> None:
        """Writes an array that was fetched from a device into the arena at ``offset``."""
        into = np.frombuffer(self.host.arena.buffer, np.uint8, fetched.nbytes, offset)
        np.copyto(into, np.ascontiguousarray(fetched).reshape(-1).view(np.uint8))


class Load:
    """The copies that bring one batch to the device; subclasses define them. See the module for its life."""

    order = OutputBatch(0)  # set by the submitter

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes  # bytes of the batch on the device, perhaps estimated
        self.measured: int | None = None  # the exact bytes, where they are only known after ``issue``
        self.issued = False  # it can be handed over, or ``error`` says why not
        self.counted = False  # its bytes are in the budget
        self.cancelled = False
        self.error: ExceptionWrapper | None = None
        self.event: Event | None = None  # after the copies of the last attempt
        self.keep: list[object] = []  # what those copies read

    def issue(self, context: LoadContext) -> None:
        """Issues all copies on the current stream, which is the copy stream. Called again after an attempt that
        raised."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drops what ``issue`` reads, since there will be no other attempt."""

    def make_room(self, context: LoadContext) -> None:
        """Copies samples of the load that are on devices to the host, before another ``issue``; waits for the devices.
        Does nothing where there are none."""

    def unload(self, context: LoadContext) -> None:
        """Copies an issued load back to the host, from where it is issued again. Waits for the device; nobody has the
        batch."""
        raise NotImplementedError

    def hand_over(self, accelerator: Accelerator) -> Value:
        """Returns the batch, ready for later work of the current stream. Called once, by the consumer's thread."""
        raise NotImplementedError


def rows_bytes(layout: Layout, rows: int) -> int:
    """Returns the bytes of a stacked batch on the device: its rows, and its small leaves once more (see
    ``RowsLoad``)."""
    whole = layout.offsets(rows)[1]
    return whole + sum(leaf.nbytes * rows for leaf in layout.leaves if is_small(leaf.nbytes * rows, whole))


class RowsLoad(Load):
    """Loads a stacked batch of ``rows`` rows from slabs in the arena and from rows that are on devices already.

    Small leaves get memory of their own, so that keeping the labels of a batch does not keep its images.

    Args:
        objects: columns of Python objects, which stay on the host.
        runs: copies from the arena into the batch.
        on_device: rows that are on a device.
        slabs: owners of the memory that ``runs`` read.
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

    def issue(self, context: LoadContext) -> None:
        """Issues as many copies from the host as the batch is worth; more ranges are gathered on the host first."""
        accelerator = context.accelerator
        self._blocks, self.keep = [], [self._on_device, self._slabs]
        slab = accelerator.empty(self._whole)
        if not context.copy(slab, self._runs, max(MOST, sum(run.nbytes for run in self._runs) // WORTH)):
            self._gather(context, slab)
        for made in {row.made for row in self._on_device}:
            assert made.event is not None
            accelerator.wait(made.event)
            context.crossed += made.accelerator is not accelerator
        blocks = [slab[at : at + nbytes] for at, nbytes in self._extents()]
        for leaf in {row.leaf for row in self._on_device}:
            into = self._layout.rows_of(blocks[leaf], leaf, self._rows).unbind(0)
            there = [row for row in self._on_device if row.leaf == leaf]
            context.slices.between()
            accelerator.copy([into[row.number] for row in there], [row.tensor for row in there])
        self._blocks = [self._own_if_small(accelerator, block) for block in blocks]

    def forget(self) -> None:
        self._on_device, self._slabs = [], []

    def make_room(self, context: LoadContext) -> None:
        """Copies the rows on devices into their rows in the arena."""
        for row in self._on_device:
            assert row.made.event is not None
            context.store(row.made.accelerator.fetch(row.tensor, row.made.event), row.run.source)
            self._runs.append(row.run)
        self._runs.sort(key=lambda run: run.target)
        self._on_device = []

    def unload(self, context: LoadContext) -> None:
        """Copies the batch into a block of the arena, in the layout that it has on the device."""
        assert self.event is not None
        block, slab = context.host.allocate(self._whole)
        for (at, nbytes), part in zip(self._extents(), self._blocks, strict=True):
            if nbytes:
                context.store(context.accelerator.fetch(part, self.event), block + at)
        self._blocks, self._runs, self._slabs = [], [CopyRange(block, 0, self._whole)], [slab]

    def _extents(self) -> list[tuple[int, int]]:
        """Returns offset and bytes of each leaf in the batch."""
        offsets, _ = self._layout.offsets(self._rows)
        return [(at, leaf.nbytes * self._rows) for at, leaf in zip(offsets, self._layout.leaves, strict=True)]

    def _gather(self, context: LoadContext, slab: torch.Tensor) -> None:
        """Joins many small ranges on the host, in a block of their own, and copies that."""
        offset, staging = context.host.allocate(self._whole)
        self.keep.append(staging)
        for run in self._runs:
            rows = np.frombuffer(context.host.arena.buffer, np.uint8, run.nbytes, run.source)
            np.copyto(staging[run.target : run.target + run.nbytes], rows)
            context.slices.between()
        context.copy(slab, [CopyRange(offset, 0, self._whole)], most=1 << 16)
        context.gathered += 1

    def _own_if_small(self, accelerator: Accelerator, block: torch.Tensor) -> torch.Tensor:
        """Returns a leaf in memory of its own if it is small, else ``block``."""
        if block.numel() == 0 or not is_small(block.numel(), self._whole):
            return block
        own = accelerator.empty(block.numel())
        accelerator.copy([own], [block])
        return own

    def hand_over(self, accelerator: Accelerator) -> Value:
        assert self.event is not None
        accelerator.wait(self.event)
        for block in self._blocks:
            if block.numel():
                accelerator.used_here(block)
        blocks, self._blocks = self._blocks, []
        return self._layout.batch_of(blocks, self._rows, self._objects)
