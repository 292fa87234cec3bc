"""Memory that leaves a worker without a copy: ``shared_empty``.

What a worker returns is copied into shared memory, unless it is stored there already. A collate function that makes
large tensors, padded ones say, makes them with ``shared_empty`` and saves the copy, and the kernel's clearing of fresh
pages: the memory of batches that the consumer has dropped is used again. PyTorch's ``default_collate`` does the same in
its workers, by a private function that makes a new file for each tensor.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from minato_gpu.memory.arena import Arena
from minato_gpu.memory.loans import Loans

LEAST = 1 << 16  # bytes; less is copied faster than it is kept account of

_allocate: Callable[[int], NDArray[np.uint8]] | None = None
_process = -1  # id of the process that owns that arena; processes that it forks must not allocate from it


def shared_empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns an uninitialised contiguous CPU tensor that leaves a worker process without being copied.

    Make a new one for every sample or batch, and do not write to it after it has been returned. Outside a worker
    process of this loader, and below 64 KiB, it is ``torch.empty``. Raises MemoryError if the worker's shared memory is
    full.

    Args:
        shape: its sizes.
        dtype: of its elements.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if _allocate is None or nbytes < LEAST or os.getpid() != _process:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(_allocate(nbytes)).view(dtype).view(tuple(shape))


class WorkerBlocks:
    """The blocks of a worker's arena that the user's code fills.

    A block is free again when the worker's last view of it has died and, where it was handed over, the engine has given
    it back.
    """

    def __init__(self, worker: int, arena: Arena) -> None:
        self._worker = worker
        self.arena = arena
        self._loans = Loans()
        self._here: set[int] = set()  # offsets of blocks that the worker still has views of
        self._away: set[int] = set()  # offsets of blocks handed over to the engine
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Provides the memory of ``shared_empty`` from now on."""
        global _allocate, _process
        _allocate, _process = self.empty, os.getpid()

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        """Returns a new block as an array of shape (nbytes,). Raises MemoryError when the arena is full."""
        with self._lock:
            self._forget_dead()
            offset, array = self._loans.allocate(self.arena, nbytes, self._worker)
            self._here.add(offset)
            return array

    def offer(self, view: memoryview) -> int | None:
        """Hands the block that begins at this view over to the engine and returns its offset; None if it must be copied
        instead."""
        if view.nbytes < LEAST or not self._here:
            return None
        with self._lock:
            offset = _address(view) - _address(self.arena.buffer)
            if offset not in self._here or offset in self._away:
                return None  # a tensor that was kept, and is returned once more, is copied
            self._away.add(offset)
            return offset

    def free(self, offset: int) -> None:
        """Notes that the engine does not need this block any more."""
        with self._lock:
            self._forget_dead()
            self._away.discard(offset)
            if offset not in self._here:
                self.arena.free(offset)

    def _forget_dead(self) -> None:
        for _, offset in self._loans.take_back():
            self._here.remove(offset)
            if offset not in self._away:
                self.arena.free(offset)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
