"""An arena, its way to a fake device, and batches that are loaded onto that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from minato_gpu.device.budget import DeviceBudget
from minato_gpu.device.copies import CopyRange
from minato_gpu.device.loads import DeviceRow, Load, MicroBatchOutput, RowsLoad
from minato_gpu.device.pinned_memory import PinnedArena
from minato_gpu.device.transfers import Transfers
from minato_gpu.memory.arena import Arena
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.loans import Loans
from minato_gpu.samples import OutputBatch
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice, FakeStream
from tests.support.waiting import wait_until

ORDERS = [LAZY_COPIES, LAZY_CONSUMER, *range(6)]
ROWS = 8
SAMPLE = {"image": np.zeros((3, 40), np.float32), "label": 0}


def layout() -> Layout:
    found = Layout.of(SAMPLE)
    assert found is not None
    return found


class Bench:
    """An arena, its way to a device, and an executor's stream on it."""

    def __init__(self, device: FakeDevice, limit: int | None = None) -> None:
        self.device = device
        self.arena = Arena("tests", 1 << 24)
        self.loans = Loans()
        self.host = PinnedArena(self.arena, self.loans, device)
        self.transfers = Transfers(device, self.host, DeviceBudget(limit))
        self.layout = layout()
        self.lanes: dict[FakeDevice, FakeStream] = {}
        self.wrong: list[Any] = []
        self.submitted = 0

    def allocated(self) -> int:
        """Bytes of the arena in use once everything that came back is free."""
        self.transfers.sweep()
        for _, offset in self.loans.take_back():
            self.arena.free(offset)
        return self.arena.allocated

    def slab(self, value: int, rows: int = ROWS) -> tuple[int, object]:
        """A slab with all rows written; label n is ``100 * value + n``."""
        offset, owner = self.host.allocate(self.layout.offsets(rows)[1])
        image, label = self.layout.views(self.arena.buffer, offset, rows)
        assert image is not None and label is not None
        image[:] = value
        label[:] = 100 * value + np.arange(rows)
        return offset, owner

    def load(self, value: int, on_device: tuple[int, ...] = (), maker: FakeDevice | None = None) -> RowsLoad:
        """A batch from one slab; the images of some rows are made on a device (``maker``), and garbage in the slab."""
        maker = maker or self.device
        slab, owner = self.slab(value)
        offsets, nbytes = self.layout.offsets(ROWS)
        image = self.layout.leaves[0].nbytes
        runs = [CopyRange(slab + n * image, n * image, image) for n in range(ROWS) if n not in on_device]
        runs.append(CopyRange(slab + offsets[1], offsets[1], nbytes - offsets[1]))
        rows: list[DeviceRow] = []
        if on_device:
            self.layout.views(self.arena.buffer, slab, ROWS)[0][list(on_device)] = -1  # type: ignore[index]
            with maker.running(self.lanes.setdefault(maker, maker.stream())):
                sources = [maker.adopt(np.full((3, 40), value, np.float32)) for _ in on_device]
                one = MicroBatchOutput(maker.event(), maker)
            for n, source in zip(on_device, sources, strict=True):
                rows.append(DeviceRow(one, 0, n, source, CopyRange(slab + n * image, n * image, image)))
        load = RowsLoad(self.layout, ROWS, [], runs, rows, [owner])
        self.submit(load)
        return load

    def scattered(self, value: int) -> RowsLoad:
        """A batch whose rows come from as many slabs, one from each."""
        offsets, _ = self.layout.offsets(ROWS)
        slabs = [self.slab(value, rows=n + 1) for n in range(ROWS)]
        runs = []
        for n, (slab, _) in enumerate(slabs):
            for leaf, at, begin in zip(self.layout.leaves, offsets, self.layout.offsets(n + 1)[0], strict=True):
                runs.append(CopyRange(slab + begin + n * leaf.nbytes, at + n * leaf.nbytes, leaf.nbytes))
        load = RowsLoad(self.layout, ROWS, [], runs, [], [owner for _, owner in slabs])
        self.submit(load)
        return load

    def submit(self, load: Load) -> None:
        """Ask for a load of the next batch."""
        load.order = OutputBatch(self.submitted)
        self.submitted += 1
        self.transfers.submit(load)

    def close(self) -> None:
        """As an engine does it."""
        self.transfers.close()
        self.host.close()

    def issued(self, load: Load) -> None:
        """Wait until the thread has issued the load."""

        def look() -> bool:
            self.transfers.room_made()  # as who waits for a batch does: there are no samples here
            return load.issued

        assert wait_until(look)

    def take(self, load: Load) -> Any:
        """The batch, as the consumer gets it."""
        self.issued(load)
        self.transfers.leave(load)
        self.transfers.expect(OutputBatch(load.order + 1))
        if load.error is not None:
            load.error.reraise()
        return load.hand_over(self.device)

    def check(self, batch: Any, value: int) -> None:
        """Let the consumer's stream read all of the batch, and drop it before that has happened."""

        def images(tensor: torch.Tensor) -> None:
            if not bool((tensor == value).all()):
                self.wrong.append(("image", value, tensor.clone()))

        def labels(tensor: torch.Tensor) -> None:
            if tensor.tolist() != [100 * value + n for n in range(ROWS)]:
                self.wrong.append(("label", value, tensor.clone()))

        self.device.read(batch["image"], images)
        self.device.read(batch["label"], labels)


@contextmanager
def bench(device: FakeDevice, limit: int | None = None) -> Iterator[Bench]:
    one = Bench(device, limit)
    try:
        yield one
    finally:
        one.close()
        device.finish()
        one.arena.close()
