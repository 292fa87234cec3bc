"""Where the device lane's results go: into rows on the host, or, where batches live on a device, they stay there.

A result that stays takes part in its batch as tensors, with the event of its micro-batch; what the host read made of
the same sample (labels, text) goes into its row on the host as ever. Results beyond the device-memory budget are
brought into their rows, and travel like those of the CPU lane.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from minato_gpu.lanes.base import Extra, Local, Piece, Resident, Task
from minato_gpu.lanes.store import Store, approximate_bytes
from minato_gpu.lanes.values import to_numpy
from minato_gpu.memory.layout import Layout, Mismatch
from minato_gpu.memory.loads import Made
from minato_gpu.memory.transfers import Transfers


class Issued(NamedTuple):
    """The references of a micro-batch's samples. ``placed``: views, row and reference of those that stay on the device,
    once ``made`` has been."""

    items: list[Any]
    placed: Sequence[tuple[list[Any], int, Resident]] = ()
    made: Made | None = None


class Outlet:
    """For one thread. ``layout``: the pickled layout of a sample, where a task came without one (the engine wants to
    know it). ``spilled``: samples that the budget sent to the host."""

    def __init__(self, store: Store, transfers: Transfers | None) -> None:
        self.layout: bytes | None = None
        self.spilled = 0
        self._store = store
        self._transfers = transfers
        self._stream: Any = None
        self._made = self._new_made()
        self._placed: list[tuple[list[Any], int, Resident]] = []
        self._sample_bytes = 0

    def _new_made(self) -> Made | None:
        return None if self._transfers is None else Made(None, self._transfers.accelerator)

    @property
    def room(self) -> int | None:
        """How many samples the device-memory budget has room for, as far as is known; None for no limit."""
        free = None if self._transfers is None else self._transfers.budget.free
        return None if free is None or not self._sample_bytes else free // self._sample_bytes

    @property
    def stream(self) -> Any:
        """The executor's stream, made by the thread that uses it; None without a device."""
        if self._stream is None and self._transfers is not None:
            self._stream = self._transfers.accelerator.stream()
        return self._stream

    def working(self) -> AbstractContextManager[Any]:
        """One micro-batch; work within it goes to the executor's stream."""
        self._placed = []
        return nullcontext() if self._transfers is None else self._transfers.accelerator.working(self.stream)

    def put(self, task: Task, piece: Piece, at: int, result: Mapping[str, Any], made: frozenset[str]) -> Any:
        """The reference of a sample. ``made``: names of the fields that device implementations made, not the CPU's."""
        if piece.slab >= 0 and task.layout:
            layout = self._store.layout(task.layout)
            views = self._store.views(piece.slab, piece.rows, task.layout)
            try:
                leaves = self._leaves(layout, result, made) if made else {}
                objects = layout.write(views, piece.row + at, result, skip=leaves)
            except Mismatch:
                pass
            else:
                if leaves:
                    item = Resident(objects or [], leaves=leaves, made=self._made)
                    self._placed.append((views, piece.row + at, item))
                    return item
                return None if objects is None else Extra(objects)
        # the fields lie in memory that goes back to its worker when this sample is reported
        value = {name: _on_host(item) for name, item in result.items()}
        if task.layout == b"" and self.layout is None:
            found = Layout.of(value)
            self.layout = None if found is None else pickle.dumps(found)
        return Local(value, approximate_bytes(value))

    def _leaves(self, layout: Layout, result: Mapping[str, Any], made: frozenset[str]) -> dict[int, torch.Tensor]:
        """The result's fields on the device, by leaf. Raises Mismatch for one that the layout has otherwise."""
        if self._transfers is None:
            return {}
        found = {}
        for name, number in layout.by_name.items():
            if name in made and name in result:
                leaf, tensor = layout.leaves[number], self._transfers.accelerator.adopt(result[name])
                if leaf.dtype is not tensor.dtype or leaf.shape != tuple(tensor.shape):
                    raise Mismatch
                found[number] = tensor
        return found

    def issued(self, items: list[Any]) -> Issued:
        """All samples of a micro-batch have been put; ``items`` are their references."""
        placed, self._placed = self._placed, []
        if self._transfers is None or not placed:
            return Issued(items)
        made, self._made = self._made, self._new_made()
        assert made is not None
        made.event = self._transfers.accelerator.event()
        return Issued(items, placed, made)

    def settle(self, issued: Issued) -> list[Any]:
        """The references of a micro-batch's samples, to be reported.

        Waits until the device has made them, in the lane's own thread: only so is it known what they cost.
        """
        items, placed, made = issued
        if self._transfers is None or made is None or made.event is None:
            return items
        made.event.synchronize()
        nbytes = sum(tensor.nbytes for _, _, item in placed for tensor in item.leaves.values())
        self._sample_bytes = nbytes // len(placed)
        budget = self._transfers.budget
        if budget.fits(nbytes):
            budget.take("samples", nbytes)
            weakref.finalize(made, budget.give, "samples", nbytes).atexit = False
            return items
        self.spilled += len(placed)
        spilled = {id(item): self._spill(*one) for one in placed for item in one[2:]}
        return [spilled.get(id(item), item) for item in items]

    def _spill(self, views: list[Any], row: int, item: Resident) -> Extra | None:
        assert self._transfers is not None
        for leaf, tensor in item.leaves.items():
            views[leaf][row] = self._transfers.accelerator.fetch(tensor, item.made.event)
        return Extra(item.objects) if item.objects else None


def _on_host(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.array(value)
    if hasattr(value, "__dlpack__") and not isinstance(value, np.generic):
        array = np.array(to_numpy(value))
        return array if array.ndim else array[()]
    return value
