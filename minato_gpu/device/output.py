"""Where the device lane's results go: into rows on the host, or, where batches live on a device, they stay there.

A result that stays takes part in its batch as tensors, with the event of its micro-batch; what the host read made of
the same sample (labels, text) goes into its row on the host as ever.

Results of unlike shapes, which a ``collate_fn`` joins on the host, go home: all of a micro-batch in one copy into
pinned memory, for which nobody waits before the device is asked for the next micro-batch.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from minato_gpu.device.accelerator import Event, Stream
from minato_gpu.device.loads import Made
from minato_gpu.device.sample_room import SampleRoom
from minato_gpu.device.staging import Download
from minato_gpu.device.transfers import Transfers
from minato_gpu.device.values import Result
from minato_gpu.lanes.base import Extra, Handed, Item, Local, Piece, Resident, Task
from minato_gpu.lanes.store import Store, approximate_bytes
from minato_gpu.memory.layout import Layout, Mismatch, Views
from minato_gpu.samples import StageError, Value

Container = Value
"""A sample's fields by name, or an array by row: where a value goes on the host."""


class Issued(NamedTuple):
    """The references of samples that were issued together.

    ``placed``: views, row and reference of those that stay on the device; ``beyond``: which has no room for them.
    ``home``: what goes to the host, to be set at the containers and keys in ``targets``; ``sample``: the one among them
    whose layout the engine wants to know.
    ``begin`` and ``end``: the device's events around all of that, the first one only where the device keeps time.
    """

    items: list[Item]
    placed: Sequence[tuple[Views, int, Resident]] = ()
    beyond: bool = False
    home: Download | None = None
    targets: Sequence[tuple[Container, str | int]] = ()
    sample: dict[str, Value] | None = None
    begin: Event | None = None
    end: Event | None = None

    @property
    def through(self) -> bool:
        """Whether ``settle`` would wait for nothing. An event that cannot be asked is for that to report."""
        try:
            return self.end is None or self.end.query()
        except Exception:
            return True


class Columns(NamedTuple):
    """Where the fields of a flat layout's samples go. ``names``: of all; ``there``: of those that stay on the device,
    with the number of the leaf, dtype and shape; ``here``: of the others, which go into rows on the host."""

    layout: Layout
    names: tuple[str, ...]
    there: list[tuple[str, int, torch.dtype | None, tuple[int, ...]]]
    here: list[tuple[str, int]]

    @classmethod
    def of(cls, layout: Layout, made: frozenset[str]) -> Columns | None:
        """``made``: names of the fields that device implementations make."""
        leaves, numbers = layout.leaves, layout.by_name
        if len(numbers) < len(leaves):
            return None
        stay = {name for name, number in numbers.items() if name in made and leaves[number].kind != "object"}
        there = [(name, n, leaves[n].dtype, leaves[n].shape) for name, n in numbers.items() if name in stay]
        return cls(layout, tuple(numbers), there, [(name, n) for name, n in numbers.items() if name not in stay])


class DeviceOutput:
    """For one thread. ``layout``: the pickled layout of a sample, where a task came without one (the engine wants to
    know it). ``spilled``: samples that the budget sent to the host. ``room``: for samples on the device, None without
    one; what is made has been reserved there."""

    def __init__(self, store: Store, transfers: Transfers | None) -> None:
        self.layout: bytes | None = None
        self.spilled = 0
        self._store = store
        self._transfers = transfers
        self.room = None if transfers is None else SampleRoom(store, transfers)
        self._stream: Stream | None = None
        self._made = self._new_made()
        self._placed: list[tuple[Views, int, Resident]] = []
        self._homeward: list[tuple[Container, str | int, torch.Tensor]] = []  # where on the host, and what goes there
        self._sample: dict[str, Value] | None = None  # on its way home, its layout wanted
        self._begin: Event | None = None
        self._known: tuple[tuple[bytes, frozenset[str]], Columns | None] | None = None  # of the last layout
        self._last: Event | None = None  # behind what was issued last, where the device keeps time

    def _new_made(self) -> Made | None:
        return None if self._transfers is None else Made(None, self._transfers.accelerator)

    @property
    def stream(self) -> Stream | None:
        """The executor's stream, made by the thread that uses it; None without a device."""
        if self._stream is None and self._transfers is not None:
            self._stream = self._transfers.accelerator.stream()
        return self._stream

    # --- making samples --------------------------------------------------------------------------------------

    @contextmanager
    def working(self, *, behind: bool = False) -> Iterator[None]:
        """Samples are made, ``put`` and then ``issued`` within it; what is issued goes to the executor's stream.

        ``behind``: the device was asked for them while it was at those that were issued before.
        """
        self._placed, self._homeward, self._begin, self._sample = [], [], None, None
        if self._transfers is None:
            yield
            return
        accelerator = self._transfers.accelerator
        try:
            stream = self.stream
            assert stream is not None
            with accelerator.working(stream):
                if accelerator.keeps_time:
                    self._begin = self._last if behind and self._last is not None else accelerator.event(timed=True)
                yield
        finally:
            self.let_go()

    def let_go(self) -> None:
        """What was taken for samples that do not stay, or were not even begun, is free again."""
        if self.room is not None:
            self.room.give_back()
        self._placed, self._homeward, self._sample = [], [], None

    def put(self, task: Task, piece: Piece, at: int, result: Mapping[str, Value], made: frozenset[str]) -> Item:
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
        lent = _is_lent(piece, at)
        value = {
            name: self._adopted(item, lent) if name in made else _on_host(item, lent) for name, item in result.items()
        }
        there = [(value, name, value[name]) for name in made if self._is_there(value.get(name))]
        self._homeward += there
        if made and self.room is not None:
            self.room.each = approximate_bytes({name: item for name, item in value.items() if name in made})
        if task.layout == b"" and self.layout is None:
            if there:
                self._sample = value
            else:
                self._describe(value)
        return Local(value, approximate_bytes(value))

    def put_all(
        self,
        task: Task,
        tickets: Sequence[tuple[Piece, int]],
        results: Sequence[Result],
        made: frozenset[str],
        each: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    ) -> list[Resident | None]:
        """``put`` of a micro-batch whose samples stay on the device: their references; None for each that is to be
        ``put`` by itself, as it failed or is not what the layout says.

        What is the same for all is done once. ``each``: goes through samples, with pauses (``CurrentStep.each``).
        """
        found: list[Resident | None] = [None] * len(results)
        layout = task.layout
        columns = self._columns(layout, made) if layout and self._transfers is not None else None
        if not layout or columns is None or not columns.there:
            return found
        slabs: dict[tuple[int, int], list[tuple[int, int, dict[str, Value], dict[int, torch.Tensor]]]] = {}
        for n, ((piece, at), result) in each(enumerate(zip(tickets, results, strict=True))):
            if isinstance(result, StageError) or piece.slab < 0:
                continue
            leaves = self._there(columns, result)
            if leaves is not None:
                slabs.setdefault((piece.slab, piece.rows), []).append((n, piece.row + at, result, leaves))
        for (slab, slab_rows), samples in each(slabs.items()):
            views = self._store.views(slab, slab_rows, layout)
            rows = [row for _, row, _, _ in samples]
            try:
                objects = _write_columns(columns, views, rows, [result for _, _, result, _ in samples])
            except Mismatch:  # of one of them: which, is found where each is put by itself
                continue
            for (n, row, _, leaves), beside in zip(samples, objects, strict=True):
                item = found[n] = Resident(beside, leaves=leaves, made=self._made)
                self._placed.append((views, row, item))
        return found

    def _columns(self, layout: bytes, made: frozenset[str]) -> Columns | None:
        """None where samples are no flat mappings."""
        if self._known is None or self._known[0] != (layout, made):
            self._known = (layout, made), Columns.of(self._store.layout(layout), made)
        return self._known[1]

    def _there(self, columns: Columns, result: dict[str, Value]) -> dict[int, torch.Tensor] | None:
        """The result's leaves on the device; None where it is not what the layout says."""
        assert self._transfers is not None
        if tuple(result) != columns.names:  # in another order, too: a batch has that of its first sample
            return None
        adopt = self._transfers.accelerator.adopt
        leaves = {}
        for name, number, dtype, shape in columns.there:
            value = result[name]
            if type(value) is not torch.Tensor and not hasattr(value, "__dlpack__"):
                return None
            tensor = adopt(value)
            if tensor.dtype is not dtype or tensor.shape != shape:
                return None
            leaves[number] = tensor
        return leaves

    def _adopted(self, value: Value, lent: bool) -> Value:
        """A tensor of the device's, to go home with others, of what was made there; else what it is on the host."""
        if self._transfers is None or not _is_array(value):
            return _on_host(value, lent)
        accelerator = self._transfers.accelerator
        stays = isinstance(value, np.ndarray) and accelerator.compute != "cpu"  # a function may leave some on the host
        return _on_host(value, lent) if stays else accelerator.adopt(value)

    def _is_there(self, value: Value) -> bool:
        """Whether what was made lies on a device. Tensors that pass through stay on the host."""
        return self._transfers is not None and isinstance(value, torch.Tensor)

    def _describe(self, value: dict[str, Value]) -> None:
        """The engine is told the layout of this sample."""
        found = Layout.of(value)
        self.layout = None if found is None else pickle.dumps(found)

    def _leaves(self, layout: Layout, result: Mapping[str, Value], made: frozenset[str]) -> dict[int, torch.Tensor]:
        """The result's fields on the device, by leaf. Raises Mismatch for one that the layout has otherwise."""
        if self._transfers is None:
            return {}
        found = {}
        for name, number in layout.by_name.items():
            if name in made and hasattr(result.get(name), "__dlpack__"):  # else it is an object, for the host's row
                leaf, tensor = layout.leaves[number], self._transfers.accelerator.adopt(result[name])
                if leaf.dtype is not tensor.dtype or leaf.shape != tuple(tensor.shape):
                    raise Mismatch
                found[number] = tensor
        return found

    def issued(self, items: list[Item]) -> Issued:
        """All samples have been put; ``items`` are their references."""
        placed, self._placed = self._placed, []
        if self._transfers is None:
            return Issued(items)
        accelerator, room = self._transfers.accelerator, self.room
        assert room is not None
        homeward, self._homeward = self._homeward, []
        if room.beyond:
            homeward += [(views[leaf], row, one) for views, row, item in placed for leaf, one in item.leaves.items()]
        home = self._download([tensor for _, _, tensor in homeward]) if homeward else None
        end = accelerator.event(timed=accelerator.keeps_time)
        self._last = end if accelerator.keeps_time else None
        if placed:
            made, self._made = self._made, self._new_made()
            assert made is not None
            made.event = end
            room.hand_on(made, sum(tensor.nbytes for _, _, item in placed for tensor in item.leaves.values()))
        elif home is not None:
            room.hand_on(home, sum(tensor.nbytes for _, _, tensor in homeward))
        targets = [(container, key) for container, key, _ in homeward]
        return Issued(items, placed, room.beyond, home, targets, self._sample, self._begin, end)

    def _download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """What they are laid side by side in is in the account, too, until that is issued."""
        assert self._transfers is not None
        budget, taken = self._transfers.budget, list[int]()

        def has_room(nbytes: int) -> bool:
            if budget.elastic:
                budget.take("samples", nbytes)
            elif not budget.take_some("samples", nbytes, 1):
                return False
            taken.append(nbytes)
            return True

        try:
            return Download(self._transfers.accelerator, tensors, has_room)
        finally:
            for nbytes in taken:
                budget.give("samples", nbytes)

    # --- once they are made ----------------------------------------------------------------------------------

    def settle(self, issued: Issued) -> list[Item]:
        """The references of the samples, to be reported. Waits until the device has made them."""
        if self._transfers is None or issued.end is None:
            return issued.items
        issued.end.synchronize()
        if issued.home is not None:
            for (container, key), array in zip(issued.targets, issued.home.arrays(), strict=True):
                container[key] = array if array.ndim else array[()]
        if issued.sample is not None and self.layout is None:
            self._describe(issued.sample)
        if not (issued.beyond and issued.placed):
            return issued.items
        self.spilled += len(issued.placed)
        left = {id(item): Extra(item.objects) if item.objects else None for _, _, item in issued.placed}
        return [left.get(id(item), item) for item in issued.items]

    def seconds(self, issued: Issued) -> float | None:
        """How long the device was at samples that have been settled; None where it does not keep time.

        It begins with the samples before on the same stream, so that is from the end of those at the earliest.
        """
        if self._transfers is None or issued.begin is None or issued.end is None:
            return None
        return self._transfers.accelerator.seconds(issued.begin, issued.end)


def _write_columns(
    columns: Columns, views: Views, rows: Sequence[int], samples: Sequence[Mapping[str, Value]]
) -> Sequence[list[Value]]:
    """Copy what of the samples goes to the host into their rows; returns the objects of each. Raises Mismatch."""
    objects: list[list[Value]] = []
    for name, number in columns.here:
        values, view = [sample[name] for sample in samples], views[number]
        if view is not None:
            columns.layout.write_column(number, view, rows, values)
            continue
        if set(map(type, values)) != {columns.layout.leaves[number].type}:
            raise Mismatch
        objects.append(values)
    return [list(beside) for beside in zip(*objects, strict=True)] if objects else [[]] * len(samples)


def _is_array(value: Value) -> bool:
    return hasattr(value, "__dlpack__") and not isinstance(value, np.generic)


def _is_lent(piece: Piece, at: int) -> bool:
    """Whether the sample's fields lie in memory that goes back to its worker once the sample is reported."""
    source = None if piece.sources is None else piece.sources[at]
    return not isinstance(source.fields if isinstance(source, Handed) else source, Local)


def _on_host(value: Value, lent: bool) -> Value:
    """The value, of which nothing lies in memory that is ``lent``."""
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return np.array(value)
    if not lent:
        return value
    if type(value) is torch.Tensor and not value.requires_grad:
        return value.clone()  # without the rest of its storage
    return copy.deepcopy(value)
