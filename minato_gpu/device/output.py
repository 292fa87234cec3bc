"""Stores the device lane's results: in rows on the host, or resident on the device where batches live there.

A resident sample is a set of tensors together with the event after its micro-batch; fields that the host read made of
it (labels, text) are written into its row on the host.

Results without a row (of unlike shapes, for a ``collate_fn`` on the host) are copied into pinned memory of the host,
without waiting before the next micro-batch is issued.
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
from minato_gpu.device.loads import MicroBatchOutput
from minato_gpu.device.sample_room import SampleRoom
from minato_gpu.device.staging import Download
from minato_gpu.device.transfers import Transfers
from minato_gpu.device.values import Result
from minato_gpu.lanes.base import Extra, Handed, Item, Local, Piece, Resident, Task
from minato_gpu.lanes.store import Store, approximate_bytes
from minato_gpu.memory.layout import Layout, Mismatch, Views
from minato_gpu.samples import StageError, Value

Container = Value
"""The place of a value on the host: a sample's fields by name, or an array by row."""


class Issued(NamedTuple):
    """Samples that were issued to the device together, with what ``DeviceOutput.settle`` needs to finish them."""

    items: list[Item]  # references
    placed: Sequence[tuple[Views, int, Resident]] = ()  # host views, row and reference of resident samples
    over_budget: bool = False  # there is no room for the resident ones: they go into their rows on the host
    download: Download | None = None  # the copy to the host
    targets: Sequence[tuple[Container, str | int]] = ()  # container and key for each array of ``download``
    sample: dict[str, Value] | None = None  # the engine wants this sample's layout
    begin: Event | None = None  # before all of it, where the device has a clock
    end: Event | None = None  # after all of it

    @property
    def finished(self) -> bool:
        """True when ``settle`` would not wait. Also true when the device fails to answer: ``settle`` then raises its
        error."""
        try:
            return self.end is None or self.end.query()
        except Exception:
            return True


class Columns(NamedTuple):
    """The leaves of a layout, divided into those that stay on the device and those written into rows on the host."""

    layout: Layout
    names: tuple[str, ...]  # names of the fields that are single leaves, in order
    resident: dict[int, tuple[str, torch.dtype | None, tuple[int, ...]]]  # name, dtype and shape by leaf
    on_host: list[tuple[str, int]] | None  # name, leaf; None where samples are not flat mappings

    @classmethod
    def of(cls, layout: Layout, made: frozenset[str]) -> Columns:
        """Returns the columns of a layout. ``made``: names of the fields that device implementations make."""
        leaves, numbers = layout.leaves, layout.by_name
        resident = {
            number: (name, leaves[number].dtype, leaves[number].shape)
            for name, number in numbers.items()
            if name in made and leaves[number].kind != "object"
        }
        flat = len(numbers) == len(leaves)
        on_host = [(name, number) for name, number in numbers.items() if number not in resident] if flat else None
        return cls(layout, tuple(numbers), resident, on_host)

    def write(self, views: Views, rows: Sequence[int], samples: Sequence[Mapping[str, Value]]) -> list[list[Value]]:
        """Writes the host leaves of samples into their rows; returns each sample's Python objects, which have no rows.
        Raises Mismatch if one does not match the layout."""
        if self.on_host is None:
            pairs = zip(rows, samples, strict=True)
            return [self.layout.write(views, row, sample, skip=self.resident) or [] for row, sample in pairs]
        objects: list[list[Value]] = []
        for name, number in self.on_host:
            values, view = [sample[name] for sample in samples], views[number]
            if view is not None:
                self.layout.write_column(number, view, rows, values)
                continue
            if set(map(type, values)) != {self.layout.leaves[number].type}:
                raise Mismatch
            objects.append(values)
        return [list(objects_of) for objects_of in zip(*objects, strict=True)] if objects else [[] for _ in samples]


class DeviceOutput:
    """Stores the results of one lane; for its thread."""

    def __init__(self, store: Store, transfers: Transfers | None) -> None:
        self.layout: bytes | None = None  # pickled, of a sample whose task came without one: the engine wants it
        self.spilled = 0  # samples copied to the host because the budget had no room
        self._store = store
        self._transfers = transfers
        self.room = None if transfers is None else SampleRoom(store, transfers)  # each result was reserved there
        self._stream: Stream | None = None
        self._output: MicroBatchOutput | None = None  # of the samples that are being made
        self._placed: list[tuple[Views, int, Resident]] = []
        self._to_host: list[tuple[Container, str | int, torch.Tensor]] = []  # target on the host, tensor
        self._sample: dict[str, Value] | None = None  # its layout is wanted once it is on the host
        self._begin: Event | None = None
        self._cached_columns: tuple[tuple[bytes, frozenset[str]], Columns] | None = None  # of the last layout
        self._last_end: Event | None = None  # event after what was issued last, where the device has a clock

    @property
    def stream(self) -> Stream | None:
        """Returns the executor's stream, made at the first call by the thread that uses it; None without a device."""
        if self._stream is None and self._transfers is not None:
            self._stream = self._transfers.accelerator.stream()
        return self._stream

    # --- making samples --------------------------------------------------------------------------------------

    @contextmanager
    def working(self, *, behind: bool = False) -> Iterator[None]:
        """Context within which samples are made, ``put`` and then ``issued``; work goes to the executor's stream.

        ``behind``: the device was given these samples while it worked on those before them, so its time counts from
        their end.
        """
        self._placed, self._to_host, self._begin, self._sample = [], [], None, None
        if self._transfers is None:
            yield
            return
        accelerator = self._transfers.accelerator
        self._output = MicroBatchOutput(None, accelerator)
        try:
            stream = self.stream
            assert stream is not None
            with accelerator.working(stream):
                if accelerator.keeps_time:
                    last = self._last_end if behind else None
                    self._begin = accelerator.event(timed=True) if last is None else last
                yield
        finally:
            self.release()

    def release(self) -> None:
        """Forgets results that were put and not ``issued``, and frees memory reserved for samples that do not stay or
        were not begun."""
        if self.room is not None:
            self.room.give_back()
        self._placed, self._to_host, self._sample = [], [], None

    def put(self, task: Task, piece: Piece, at: int, result: Mapping[str, Value], made: frozenset[str]) -> Item:
        """Stores one sample and returns its reference; None: all of it is in its row on the host. ``made``: names of
        the fields that a device implementation made."""
        accelerator = None if self._transfers is None else self._transfers.accelerator
        on_device = frozenset(name for name in made if accelerator and hasattr(result.get(name), "__dlpack__"))
        if on_device:
            item = self.put_all(task, [(piece, at)], [dict(result)], on_device)[0]
            if item is not None:
                return item
        elif piece.slab >= 0 and task.layout:
            views = self._store.views(piece.slab, piece.rows, task.layout)
            try:
                objects = self._store.layout(task.layout).write(views, piece.row + at, result)
            except Mismatch:
                pass
            else:
                return None if objects is None else Extra(objects)
        borrowed = _is_borrowed(piece, at)
        value, resident = dict(result), list[tuple[Container, str | int, torch.Tensor]]()
        for name, one in result.items():
            if accelerator and name in on_device and not (isinstance(one, np.ndarray) and accelerator.compute != "cpu"):
                value[name] = accelerator.adopt(one)
                resident.append((value, name, value[name]))
            else:  # also an array that a GPU's function has left on the host
                value[name] = _on_host(one, borrowed)
        self._to_host += resident
        if made and self.room is not None:
            self.room.sample_bytes = approximate_bytes({name: item for name, item in value.items() if name in made})
        if task.layout == b"" and self.layout is None:
            if resident:
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
        """Stores the samples of a micro-batch that stay on the device. Returns their references; None for each that is
        to be stored by ``put``, because it failed or does not match the layout.

        Work common to all samples is done once. ``each`` iterates over samples with pauses (``CurrentStep.each``).
        """
        found: list[Resident | None] = [None] * len(results)
        layout = task.layout
        if not layout or self._transfers is None:
            return found
        columns = self._columns(layout, made)
        if not columns.resident:
            return found
        slabs: dict[tuple[int, int], list[tuple[int, int, dict[str, Value], dict[int, torch.Tensor]]]] = {}
        for n, ((piece, at), result) in each(enumerate(zip(tickets, results, strict=True))):
            if isinstance(result, StageError) or piece.slab < 0:
                continue
            leaves = self._resident_leaves(columns, result)
            if leaves is not None:
                slabs.setdefault((piece.slab, piece.rows), []).append((n, piece.row + at, result, leaves))
        for (slab, slab_rows), samples in each(slabs.items()):
            views = self._store.views(slab, slab_rows, layout)
            rows = [row for _, row, _, _ in samples]
            try:
                objects = columns.write(views, rows, [result for _, _, result, _ in samples])
            except Mismatch:  # of one of them; ``put`` finds out which
                continue
            for (n, row, _, leaves), objects_of in zip(samples, objects, strict=True):
                item = found[n] = Resident(objects_of, leaves=leaves, made=self._output)
                self._placed.append((views, row, item))
        return found

    def _columns(self, layout: bytes, made: frozenset[str]) -> Columns:
        """Returns the columns of the layout, cached."""
        if self._cached_columns is None or self._cached_columns[0] != (layout, made):
            self._cached_columns = (layout, made), Columns.of(self._store.layout(layout), made)
        return self._cached_columns[1]

    def _resident_leaves(self, columns: Columns, result: dict[str, Value]) -> dict[int, torch.Tensor] | None:
        """Returns a result's tensors on the device by leaf number; None where it does not match the layout."""
        assert self._transfers is not None
        if columns.on_host is not None and tuple(result) != columns.names:  # a batch has the order of its first sample
            return None
        adopt = self._transfers.accelerator.adopt
        leaves = {}
        for number, (name, dtype, shape) in columns.resident.items():
            value = result.get(name)
            if type(value) is not torch.Tensor and not hasattr(value, "__dlpack__"):
                return None
            tensor = adopt(value)
            if tensor.dtype is not dtype or tensor.shape != shape:
                return None
            leaves[number] = tensor
        return leaves

    def _describe(self, value: dict[str, Value]) -> None:
        """Sets ``layout`` to that of this sample, for the engine."""
        found = Layout.of(value)
        self.layout = None if found is None else pickle.dumps(found)

    def issued(self, items: list[Item]) -> Issued:
        """Records the event after all samples that were put, and returns them. ``items`` are their references."""
        placed, self._placed = self._placed, []
        if self._transfers is None:
            return Issued(items)
        accelerator, room = self._transfers.accelerator, self.room
        assert room is not None
        to_host, self._to_host = self._to_host, []
        if room.over_budget:
            to_host += [(views[leaf], row, one) for views, row, item in placed for leaf, one in item.leaves.items()]
        download = Download(accelerator, [tensor for _, _, tensor in to_host]) if to_host else None
        end = accelerator.event(timed=accelerator.keeps_time)
        self._last_end = end if accelerator.keeps_time else None
        if placed:
            made, self._output = self._output, None
            assert made is not None
            made.event = end
            room.hand_on(made, sum(tensor.nbytes for _, _, item in placed for tensor in item.leaves.values()))
        elif download is not None:
            room.hand_on(download, sum(tensor.nbytes for _, _, tensor in to_host))
        targets = [(container, key) for container, key, _ in to_host]
        return Issued(items, placed, room.over_budget, download, targets, self._sample, self._begin, end)

    # --- once they are made ----------------------------------------------------------------------------------

    def settle(self, issued: Issued) -> tuple[list[Item], float | None]:
        """Waits until the device has made the samples; returns their final references, and its time for them in
        seconds (None: it has no clock). Raises the device's error.

        The time counts from the later of two events: the begin of these samples, and the end of those before on the
        same stream.
        """
        if self._transfers is None or issued.end is None:
            return issued.items, None
        issued.end.synchronize()
        if issued.download is not None:
            for (container, key), array in zip(issued.targets, issued.download.arrays(), strict=True):
                container[key] = array if array.ndim else array[()]
        if issued.sample is not None and self.layout is None:
            self._describe(issued.sample)
        begin, end = issued.begin, issued.end
        seconds = None if begin is None else self._transfers.accelerator.seconds(begin, end)
        if not (issued.over_budget and issued.placed):
            return issued.items, seconds
        self.spilled += len(issued.placed)
        left = {id(item): Extra(item.objects) if item.objects else None for _, _, item in issued.placed}
        return [left.get(id(item), item) for item in issued.items], seconds


def _is_borrowed(piece: Piece, at: int) -> bool:
    """Returns True when a sample's fields are in memory that returns to its worker once the sample is reported."""
    source = None if piece.sources is None else piece.sources[at]
    return not isinstance(source.fields if isinstance(source, Handed) else source, Local)


def _on_host(value: Value, borrowed: bool) -> Value:
    """Returns the value with nothing of it in memory that is ``borrowed``."""
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return np.array(value)
    if not borrowed:
        return value
    if type(value) is torch.Tensor and not value.requires_grad:
        return value.clone()  # without the rest of its storage
    return copy.deepcopy(value)
