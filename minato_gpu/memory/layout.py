"""The layout of a stackable sample: how ``default_collate`` would stack it.

It is known ahead, so that a worker writes each of a sample's arrays straight into a row of the batch. A layout is made
from one sample and holds for all that have the same structure, types, dtypes and shapes. A sample that differs raises
``Mismatch`` before anything of it counts as written, and travels as a blob instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils import collate as torch_collate

from minato_gpu.memory.arena import round_up
from minato_gpu.memory.loans import apart
from minato_gpu.samples import Value
from minato_gpu.util.cached_property import cached_property

_ALIGN = 64
_SCALARS: dict[type, np.dtype[np.generic]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
}
_STACKABLE = {
    np.dtype(kind) for kind in ("?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16")
}
# as PyTorch fills it, before anybody registers functions of their own
_COLLATED_BY: dict[Any, Any] = {
    torch.Tensor: torch_collate.collate_tensor_fn,
    np.ndarray: torch_collate.collate_numpy_array_fn,
    (np.bool_, np.number, np.object_): torch_collate.collate_numpy_scalar_fn,
    float: torch_collate.collate_float_fn,
    int: torch_collate.collate_int_fn,
    str: torch_collate.collate_str_fn,
    bytes: torch_collate.collate_str_fn,
}
_SMALL_BYTES = 64 << 10  # of a row: samples of as many are stacked together


class Mismatch(Exception):
    """A sample does not fit the layout of the ones before it."""


@dataclass(frozen=True)
class Leaf:
    """One array, tensor, number or text of a sample."""

    kind: str  # tensor, array, scalar (Python or NumPy), or object (strings, bytes)
    type: type  # class of the value in a sample
    shape: tuple[int, ...]  # in one sample
    raw: np.dtype[np.generic]  # dtype of the stored bytes
    dtype: torch.dtype | None  # dtype that the consumer sees
    in_sequence: bool = False  # object in a list or tuple: ``default_collate`` makes a tuple of such, else a list

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one row; 1 for an object, which is stored beside the slab."""
        return math.prod(self.shape) * self.raw.itemsize


Views = list[NDArray[Value] | None]
"""Arrays of a slab, one for each leaf; None for objects."""

Tree = Any
"""A leaf's number, or (dict, ((key, tree), ...)), (list, trees), (tuple, trees), (namedtuple type, trees)."""


@dataclass(frozen=True)
class Layout:
    """Structure and leaves of a stackable sample. Frozen, hashable and picklable."""

    tree: Tree
    leaves: tuple[Leaf, ...]
    _offsets: dict[int, tuple[list[int], int]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, sample: Value) -> Layout | None:
        """Returns the layout of a sample; None if ``default_collate`` would not simply stack it, or it is all text."""
        leaves: list[Leaf] = []
        try:
            tree = _describe(sample, leaves, in_sequence=False)
        except Mismatch:
            return None
        if not any(leaf.kind != "object" for leaf in leaves):
            return None
        return cls(tree, tuple(leaves))

    def offsets(self, rows: int) -> tuple[list[int], int]:
        """Returns the offset of each leaf's block of ``rows`` rows in a slab, and the slab's size, both in bytes."""
        known = self._offsets.get(rows)
        if known is None:
            sizes = (round_up(leaf.nbytes * rows, _ALIGN) for leaf in self.leaves)
            *offsets, end = accumulate(sizes, initial=0)
            known = self._offsets[rows] = offsets, max(end, _ALIGN)
        return known

    def views(self, buffer: Value, offset: int, rows: int) -> Views:
        """Returns the slab at ``offset`` of ``buffer``: for each leaf an array of shape (rows, *leaf.shape), or None if
        the leaf is an object."""
        offsets, _ = self.offsets(rows)
        return [
            None if leaf.kind == "object" else np.ndarray((rows, *leaf.shape), leaf.raw, buffer, offset + at)
            for leaf, at in zip(self.leaves, offsets, strict=True)
        ]

    @cached_property
    def objects(self) -> int:
        """The number of leaves that are kept beside the slab (strings and bytes)."""
        return sum(leaf.kind == "object" for leaf in self.leaves)

    def write(self, views: Views, row: int, sample: Value, skip: Collection[int] = ()) -> list[Value] | None:
        """Writes a sample into its row; returns its object leaves, or None if it has none.

        Leaves whose numbers are in ``skip`` are stored elsewhere and are not looked at. Raises ``Mismatch`` if the
        sample differs from the layout; the row's bytes are then undefined.
        """
        values = _flattened(self.tree, sample)
        objects: list[Value] | None = None
        for number, (leaf, view, value) in enumerate(zip(self.leaves, views, values, strict=True)):
            if number in skip:
                continue
            kind = type(value)
            if kind is not leaf.type:
                raise Mismatch
            if view is None:
                objects = objects or []
                objects.append(value)
            elif leaf.kind == "array":
                if value.dtype != leaf.raw or value.shape != leaf.shape or _backwards(value):
                    raise Mismatch
                view[row] = value
            elif leaf.kind == "tensor":
                view[row] = _fitting(value, leaf)
            else:
                try:
                    view[row] = value
                except OverflowError:
                    raise Mismatch from None
        return objects

    def write_column(self, number: int, view: NDArray[Value], rows: Sequence[int], values: Sequence[Value]) -> None:
        """Writes leaf ``number`` (no object) of several samples into their rows of its ``view``.

        Raises ``Mismatch`` if a sample differs from the layout.
        """
        leaf = self.leaves[number]
        if set(map(type, values)) != {leaf.type}:
            raise Mismatch
        if leaf.kind == "scalar":
            try:
                view[rows] = np.array(values, leaf.raw)
            except OverflowError:
                raise Mismatch from None
            return
        for row, value in zip(rows, values, strict=True):
            if leaf.kind == "tensor":
                view[row] = _fitting(value, leaf)
            elif value.dtype != leaf.raw or value.shape != leaf.shape or _backwards(value):
                raise Mismatch
            else:
                view[row] = value

    @cached_property
    def stacks(self) -> bool:
        """True if writing several samples at once, column by column, is faster than one after the other.

        So it is for small tensors: each costs a microsecond less, and of larger ones the processor's caches lose the
        first before the last is there.
        """
        kinds = {leaf.kind for leaf in self.leaves}
        return "tensor" in kinds <= {"tensor", "scalar"} and sum(leaf.nbytes for leaf in self.leaves) <= _SMALL_BYTES

    def write_rows(self, views: Views, row: int, samples: Sequence[Value]) -> bool:
        """Writes samples into the rows from ``row`` on. Only for a layout that ``stacks``.

        Returns False if a sample may differ from the layout: the rows' bytes are then undefined, and ``write``, called
        for each, says which one does.
        """
        try:
            rows = [_flattened(self.tree, sample) for sample in samples]
            for leaf, view, column in zip(self.leaves, views, zip(*rows, strict=True), strict=True):
                if view is None or set(map(type, column)) != {leaf.type}:
                    return False
                part = view[row : row + len(samples)]
                if leaf.kind == "scalar":
                    part[:] = column
                elif {each.dtype for each in column} != {leaf.dtype} or column[0].shape != leaf.shape:
                    return False
                else:  # which refuses other shapes, and tensors that are not plain
                    torch.stack(column, out=torch.from_numpy(part))
        except (Mismatch, OverflowError, RuntimeError, TypeError):
            return False
        return True

    def writer(self, views: Views) -> Callable[[int, Value], list[Value] | None]:
        """Returns ``write`` bound to a slab, without detours for samples of a single array or tensor, the most
        common ones."""
        leaf, view = self.leaves[0], views[0]
        if self.tree != 0 or view is None or leaf.kind == "scalar":
            return lambda row, sample: self.write(views, row, sample)
        kind: Any = leaf.type
        dtype, shape = leaf.raw, leaf.shape

        def write_tensor(row: int, sample: Value) -> None:
            if type(sample) is not torch.Tensor:
                raise Mismatch
            view[row] = _fitting(sample, leaf)

        def write_array(row: int, sample: Value) -> None:
            if type(sample) is not kind or sample.shape != shape:
                raise Mismatch
            if (sample.dtype is not dtype and sample.dtype != dtype) or _backwards(sample):
                raise Mismatch
            view[row] = sample

        return write_array if leaf.kind == "array" else write_tensor

    def batch(self, owner: NDArray[np.uint8], rows: int, objects: list[list[Value]]) -> Value:
        """Returns the batch as ``default_collate`` would, with tensors of shape (rows, *shape). They are views of
        ``owner``, the slab; small ones are copies, so that they do not keep the rest.

        ``objects[row]`` holds the object leaves of each row (any list when there are none).
        """
        offsets, _ = self.offsets(rows)

        def part(number: int, leaf: Leaf) -> torch.Tensor:
            if leaf.nbytes == 0:
                return torch.empty((rows, *leaf.shape), dtype=leaf.dtype)
            at = offsets[number]
            array = apart(owner[at : at + leaf.nbytes * rows], owner.nbytes).view(leaf.raw)
            return torch.from_numpy(array.reshape((rows, *leaf.shape)))

        return self._joined(part, objects)

    def batch_of(self, blocks: Sequence[torch.Tensor], rows: int, objects: list[list[Value]]) -> Value:
        """Returns the batch as ``batch`` does, over ``blocks``: a flat uint8 tensor for each leaf, on any device. Those
        of object leaves are not looked at."""
        return self._joined(lambda number, _: self.rows_of(blocks[number], number, rows), objects)

    def _joined(self, part: Callable[[int, Leaf], torch.Tensor], objects: list[list[Value]]) -> Value:
        values: list[Value] = []
        column = 0
        for number, leaf in enumerate(self.leaves):
            if leaf.kind == "object":
                items = [row[column] for row in objects]
                values.append(tuple(items) if leaf.in_sequence else items)
                column += 1
            else:
                values.append(part(number, leaf))
        return _rebuild(self.tree, values, stacked=True)

    def rows_of(self, block: torch.Tensor, number: int, rows: int) -> torch.Tensor:
        """Returns a flat uint8 tensor as the rows of leaf ``number``: shape (rows, *shape), in the dtype that is
        delivered."""
        leaf = self.leaves[number]
        assert leaf.dtype is not None
        return block.view(leaf.dtype).view((rows, *leaf.shape))

    @cached_property
    def by_name(self) -> dict[Value, int]:
        """The leaf numbers of a mapping's direct fields, by name; empty for other samples."""
        flat = not isinstance(self.tree, int) and self.tree[0] is dict
        return {key: tree for key, tree in self.tree[1] if isinstance(tree, int)} if flat else {}

    def read(self, views: Views, row: int, objects: list[Value] | None) -> Value:
        """Returns one sample from its row, with its original types. Arrays and tensors are views of the slab.
        ``objects``: the row's object leaves; None if there are none."""
        values: list[Value] = []
        rest = iter(objects or ())
        for leaf, view in zip(self.leaves, views, strict=True):
            if view is None:
                values.append(next(rest))
            elif leaf.kind == "scalar":
                values.append(leaf.type(view[row]) if leaf.type in _SCALARS else view[row])
            elif leaf.kind == "array":
                values.append(view[row] if leaf.shape else view[row].reshape(()))
            else:
                values.append(torch.from_numpy(view[row : row + 1])[0])
        return _rebuild(self.tree, values, stacked=False)


def _describe(value: Value, leaves: list[Leaf], in_sequence: bool) -> Tree:
    kind = type(value)
    is_array = isinstance(value, np.ndarray)  # of a subclass only its elements count, too
    if _is_registered(value) or (is_array and _is_registered(torch.empty(0))):  # arrays become tensors
        raise Mismatch
    if kind is dict:
        return (kind, tuple((key, _describe(item, leaves, False)) for key, item in value.items()))
    if kind is list or kind is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        if not value:
            raise Mismatch
        return (kind, tuple(_describe(item, leaves, True) for item in value))
    leaves.append(_leaf(value, in_sequence))
    return len(leaves) - 1


def _is_registered(value: Value) -> bool:
    """Returns whether somebody has registered a function that ``default_collate`` may join such values by."""
    given: dict[Any, Any] = torch_collate.default_collate_fn_map
    return any(_COLLATED_BY.get(kind) is not join and isinstance(value, kind) for kind, join in given.items())


def _leaf(value: Value, in_sequence: bool) -> Leaf:
    kind = type(value)
    if kind is torch.Tensor and _plain(value):
        try:
            raw = value.numpy().dtype
        except TypeError:  # NumPy has no such dtype (bfloat16, say): default_collate joins them in a worker
            raise Mismatch from None
        return Leaf("tensor", kind, tuple(value.shape), raw, value.dtype)
    if isinstance(value, np.ndarray) and value.dtype in _STACKABLE and value.ndim and not _backwards(value):
        return Leaf("array", kind, value.shape, value.dtype, torch_dtype(value.dtype))
    if kind in _SCALARS:
        return Leaf("scalar", kind, (), _SCALARS[kind], torch_dtype(_SCALARS[kind]))
    if isinstance(value, np.generic) and value.dtype in _STACKABLE and value.dtype != np.uint64:
        return Leaf("scalar", kind, (), value.dtype, torch_dtype(value.dtype))
    if kind in (str, bytes):
        return Leaf("object", kind, (), np.dtype(np.uint8), None, in_sequence)
    raise Mismatch


def torch_dtype(raw: np.dtype[Any]) -> torch.dtype:
    """Returns PyTorch's dtype for NumPy's. Raises TypeError if it has none."""
    return torch.from_numpy(np.empty(0, raw)).dtype


def _backwards(value: NDArray[Value]) -> bool:
    """Returns whether an array has a negative stride, which torch refuses."""
    return not value.flags.forc and min(value.strides) < 0


def _plain(value: torch.Tensor) -> bool:
    return (
        value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not (value.is_conj() or value.is_neg() or value.is_quantized or value.is_nested)
    )


def _fitting(value: torch.Tensor, leaf: Leaf) -> NDArray[Value]:
    """Returns the tensor's elements as an array. Raises Mismatch if the tensor does not fit the leaf.

    Each call on a tensor runs torch's code, which a costly sample evicts from the processor's caches. So only ``numpy``
    is called: it refuses what is not plain.
    """
    try:
        array = value.numpy()
    except (TypeError, RuntimeError):
        raise Mismatch from None
    if array.dtype != leaf.raw or array.shape != leaf.shape:
        raise Mismatch
    return array


def _flattened(tree: Tree, value: Value) -> list[Value]:
    """Returns the leaves of a sample. Raises Mismatch if its structure differs."""
    values: list[Value] = []
    _flatten(tree, value, values)
    return values


def _flatten(tree: Tree, value: Value, out: list[Value]) -> None:
    if isinstance(tree, int):
        out.append(value)
        return
    kind, parts = tree
    if type(value) is not kind or len(value) != len(parts):
        raise Mismatch
    if kind is dict:
        for (key, part), (own, item) in zip(parts, value.items(), strict=True):
            if own != key:  # in another order, too: a batch has that of its first sample
                raise Mismatch
            _flatten(part, item, out)
        return
    for part, item in zip(parts, value, strict=True):
        _flatten(part, item, out)


def _rebuild(tree: Tree, values: list[Value], *, stacked: bool) -> Value:
    if isinstance(tree, int):
        return values[tree]
    kind, parts = tree
    if kind is dict:
        return {key: _rebuild(part, values, stacked=stacked) for key, part in parts}
    items = [_rebuild(part, values, stacked=stacked) for part in parts]
    if kind is list or (kind is tuple and stacked):  # default_collate turns plain tuples into lists
        return items
    return tuple(items) if kind is tuple else kind(*items)
