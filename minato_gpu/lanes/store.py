"""The memory for a worker's results: rows of the engine's slabs, or blobs in its own arena.

Thread workers share the process, so their objects are handed over as they are; rows are written all the same.
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
from numpy.typing import NDArray

from minato_gpu.lanes.base import Blob, Item, Local, Row, StoredSample
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory import blobs
from minato_gpu.memory.arena import Arena
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.worker_blocks import WorkerBlocks
from minato_gpu.samples import Value


class Store:
    """Writes and reads a worker's samples in shared memory."""

    def __init__(self, worker: int, links: WorkerChannels, arena: Arena | None = None) -> None:
        self._worker = worker
        self._links = links
        # None: threads hand objects over as they are
        self.handover = None if arena is None else WorkerBlocks(worker, arena)
        self._layouts: dict[bytes, Layout] = {}
        self._slab: tuple[int, int, bytes] | None = None
        self._views: list[NDArray[Value] | None] = []

    def layout(self, data: bytes) -> Layout:
        """Returns the layout with this pickle."""
        layout = self._layouts.get(data)
        if layout is None:
            layout = self._layouts[data] = pickle.loads(data)
        return layout

    def views(self, slab: int, rows: int, layout: bytes) -> list[NDArray[Value] | None]:
        """Returns the arrays of a slab in the engine's arena, as ``Layout.views`` does. ``layout``: a pickled one."""
        if self._slab != (slab, rows, layout):
            self._slab = (slab, rows, layout)
            self._views = self.layout(layout).views(self._links.buffer(-1), slab, rows)
        return self._views

    def put(self, value: Value, *, collated: bool = False) -> Blob | Local:
        """Stores an object for other processes to read, and returns where; a thread's object stays as it is.

        Raises what pickling it raises, and MemoryError.
        """
        handover = self.handover
        if handover is None:
            return Local(value, approximate_bytes(value), collated)
        self.reclaim()
        parts: list[tuple[int, int]] = []

        def is_part(view: memoryview) -> bool:
            offset = handover.offer(view)
            if offset is not None:
                parts.append((offset, view.nbytes))
            return offset is not None

        try:
            dumped = blobs.dump(value, is_part)
            offset = handover.arena.allocate(dumped.nbytes)
        except BaseException:
            for part, _ in parts:
                handover.free(part)
            raise
        blobs.write(handover.arena.buffer[offset : offset + dumped.nbytes], dumped)
        return Blob(self._worker, ((offset, dumped.nbytes), *parts), collated)

    def put_bytes(self, data: bytes | memoryview) -> tuple[int, int]:
        """Stores bytes in the worker's arena, until the parent gives them back; returns offset and bytes."""
        assert self.handover is not None
        self.reclaim()
        arena = self.handover.arena
        offset = arena.allocate(len(data))
        arena.buffer[offset : offset + len(data)] = data
        return offset, len(data)

    def reclaim(self) -> None:
        """Frees what the parent has given back."""
        assert self.handover is not None
        for offset in self._links.board.returned(self._worker):
            self.handover.free(offset)

    def discard(self, item: Item) -> None:
        """Takes back what was put and never reported."""
        if isinstance(item, Blob) and self.handover is not None:
            for offset, _ in item.blocks:
                self.handover.free(offset)

    def get(self, item: StoredSample, *, lasting: bool = False) -> Value:
        """Returns a stored object.

        Its arrays are views of shared memory, which is used again once its blocks have been given back; with
        ``lasting`` they have memory of their own, for callers that may keep them.
        """
        if isinstance(item, Local):
            return item.value
        if isinstance(item, Row):
            views = self.views(item.slab, item.rows, item.layout)
            value = self.layout(item.layout).read(views, item.row, item.objects)
            return copy.deepcopy(value) if lasting else value
        assert isinstance(item, Blob)
        buffer = self._links.buffer(item.worker)
        if len(item.blocks) == 1 and not lasting:
            ((offset, nbytes),) = item.blocks
            return blobs.load(buffer[offset : offset + nbytes])
        block, *parts = (buffer[offset : offset + nbytes] for offset, nbytes in item.blocks)
        if lasting:
            return blobs.load(np.array(block), [np.array(part) for part in parts])
        return blobs.load(block, parts)


def approximate_bytes(value: Value) -> int:
    """Returns the bytes of the arrays, tensors and texts in a sample, without pickling it."""
    if isinstance(value, dict):
        return sum(approximate_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(approximate_bytes(item) for item in value)
    if isinstance(value, (bytes, str)):
        return len(value)
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0
