"""Loads batches that a ``collate_fn`` made (any nesting of containers and tensors) onto the device; see ``loads``.

The tensors are copied side by side into the pinned arena and from there in a few copies: a copy from pageable memory
would block the issuing thread. On the device small tensors share one block, and so do a few neighbours of a long list,
so that keeping the labels does not keep the images.
"""

from __future__ import annotations

import copy
from collections import UserString
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch

from minato_gpu.device.accelerator import Accelerator
from minato_gpu.device.copies import MOST, CopyRange
from minato_gpu.device.loads import Load, LoadContext
from minato_gpu.device.staging import side_by_side
from minato_gpu.memory.blobs import bytes_of, strided_parts, without_gaps
from minato_gpu.memory.loans import is_small
from minato_gpu.samples import Value

_NO_CONTAINERS = (
    int,
    float,
    str,
    bytes,
    bytearray,
    memoryview,
    range,
    UserString,
    np.ndarray,
)  # values without tensors inside, although some are sequences
_Items = list[tuple[Value, Value]]


class ValueLoad(Load):
    """Loads what ``make`` returns: any nesting of containers and tensors; other values stay as they are.

    ``make`` is called once for each attempt and kept until the batch is handed over, because a batch that has to leave
    the device is made from it again.

    Args:
        nbytes: bytes of the batch on the host, which is only an estimate for the device.
    """

    def __init__(self, make: Callable[[], Value], nbytes: int) -> None:
        super().__init__(nbytes)
        self._make = make
        self._value: Value = None
        self._used: list[torch.Tensor] = []  # memory of the batch, to be recorded on the consumer's stream

    def issue(self, context: LoadContext) -> None:
        """Issues at most ``copies.MOST`` copies, and one more for each end of a pinned piece that a copy would cross.
        Tensors that their bytes do not fully describe are moved by torch, which may wait."""
        self.unload(context)
        try:
            value = self._make()
            found: list[torch.Tensor] = []

            def note(tensor: torch.Tensor) -> torch.Tensor:
                found.append(tensor)
                return tensor

            mapped(value, note)
            copied = iter(self._copy(context, [tensor for tensor in found if _is_plain(tensor)]))

            def loaded(tensor: torch.Tensor) -> torch.Tensor:
                if _is_plain(tensor):
                    return next(copied)
                return tensor if tensor.device.type != "cpu" else self._move_by_torch(context.accelerator, tensor)

            self._value = mapped(value, loaded)
        except BaseException:  # free what was allocated while the rest waits for memory
            self.unload(context)
            raise
        self.measured = sum(part.numel() * part.element_size() for part in self._used)

    def _move_by_torch(self, accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
        """Moves a tensor with ``Tensor.to``: a sparse or quantised one, or another that its bytes do not fully
        describe."""
        moved = tensor.to(accelerator.device)
        self._used += [part for part in strided_parts(moved.detach()) if part.numel()]
        return moved

    def _copy(self, context: LoadContext, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors on the device, in the same order."""
        found: dict[int, torch.Tensor] = {}
        for numbers in _groups([tensor.nbytes for tensor in tensors]):
            places, total = side_by_side([tensors[number].nbytes for number in numbers])
            block, staging = context.host.allocate(total)
            self.keep.append(staging)
            memory = context.accelerator.empty(total)
            self._used.append(memory)
            for at, number in zip(places, numbers, strict=True):
                tensor = without_gaps(tensors[number])
                end = at + tensor.nbytes
                np.copyto(staging[at:end], bytes_of(tensor).numpy())
                found[number] = memory[at:end].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
                context.slices.between()
            context.copy(memory, [CopyRange(block, 0, total)], most=1 << 16)
        return [found[number] for number in range(len(tensors))]

    def unload(self, context: LoadContext) -> None:
        """Drops the batch on the device; ``issue`` makes it again."""
        self._value, self._used = None, []

    def hand_over(self, accelerator: Accelerator) -> Value:
        assert self.event is not None
        accelerator.wait(self.event)
        for memory in self._used:
            accelerator.used_here(memory)
        value, self._value, self._used, self._make = self._value, None, [], lambda: None
        return value


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns True for a non-empty CPU tensor that is fully described by its bytes, dtype, shape and strides."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    on_host = tensor.device.type == "cpu" and plain and tensor.numel() > 0
    return on_host and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Divides tensors, given by their bytes, into at most ``MOST`` groups that share memory: all small ones, and
    neighbours among the others."""
    whole = sum(sizes)
    small = [number for number, nbytes in enumerate(sizes) if is_small(nbytes, whole)]
    large = [number for number, nbytes in enumerate(sizes) if not is_small(nbytes, whole)]
    each = -(-len(large) // (MOST - 1)) or 1
    return [group for group in (small, *(large[at : at + each] for at in range(0, len(large), each))) if group]


def mapped(value: Value, function: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    """Returns a nested batch with ``function`` applied to its tensors, in mappings and sequences of any class. Other
    values are kept; ``value`` does not change."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _NO_CONTAINERS):
        return value
    if type(value) is dict:
        return {key: mapped(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([mapped(item, function) for item in value])
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, Sequence):
        items = list(enumerate(value))
    else:
        return value
    after = [(key, mapped(item, function)) for key, item in items]
    if all(new is old for (_, new), (_, old) in zip(after, items, strict=True)):
        return value
    return _rebuilt(value, items, after)


def _rebuilt(value: Value, items: _Items, after: _Items) -> Value:
    """Returns a container like ``value`` with ``after`` in place of ``items``: a copy with its attributes if it can be
    assigned to, else built by its class, else a plain dict or list."""
    with suppress(Exception):  # its class's own code runs
        copied = copy.copy(value)
        _assign(copied, after)
        if all(value[key] is item for key, item in items):
            return copied
        _assign(value, items)  # the copy has no items of its own
    new = dict(after) if isinstance(value, Mapping) else [item for _, item in after]
    if isinstance(value, tuple):
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    with suppress(Exception):
        return type(value)(new)
    return new


def _assign(container: Value, items: _Items) -> None:
    for key, item in items:
        container[key] = item
