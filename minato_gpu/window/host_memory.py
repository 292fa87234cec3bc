"""Accounts for the memory of samples and batches, and returns it to its owner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from minato_gpu.lanes.base import Blob, Item, Local, Stored, stored_part
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory import blobs
from minato_gpu.samples import Value
from minato_gpu.window.loading import Loading


class HostMemoryAccount:
    """Accounts for blocks of the workers' arenas and of the engine's.

    ``bytes``: of samples and batches that are ready and not delivered; ``peak``: their maximum so far.
    """

    def __init__(self, links: WorkerChannels, loading: Loading | None) -> None:
        self._links = links
        self._loans = links.loans
        self._loading = loading
        self.bytes = 0
        self.peak = 0

    def count(self, nbytes: int) -> None:
        """Counts so many bytes more (or fewer) as in flight."""
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)

    def release(self, item: Item) -> None:
        """Returns the blob of an item, if it has one, to the worker that owns the memory."""
        if isinstance(stored := stored_part(item), Blob):
            self._loans.give_back(stored.places)

    def lend(self, item: Stored) -> Callable[[], Value]:
        """Registers an object's memory as loaned; returns a function that returns the object."""
        if isinstance(item, Local):
            return lambda: item.value
        buffer, lend = self._links.buffer(item.worker), self._loans.lend
        block, *parts = (lend(buffer, item.worker, offset, nbytes) for offset, nbytes in item.blocks)
        return partial(blobs.load, block, parts, copies_small=True)

    def reclaim(self) -> None:
        """Takes back the blocks whose last view has died."""
        loans, links = self._loans, self._links
        if self._loading is not None:
            self._loading.sweep()
        for owner, offset in loans.take_back():
            if owner < 0:
                links.engine_arena.free(offset)
            elif not links.board.give_back(owner, offset):
                loans.give_back([(owner, offset)])

    def bury(self, owner: int) -> list[tuple[int, int]]:
        """Handles the death of a worker: its returned blocks need not be reported any more.

        Returns its loaned blocks (offset, bytes).
        """
        self._loans.give_back([block for block in self._loans.take_back() if block[0] != owner])
        return self._loans.lent_by(owner)
