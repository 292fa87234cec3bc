"""Batches that are no rows, what a ``collate_fn`` made, on their way to the device (see ``loads``).

Their tensors are laid side by side in the host's arena, which is pinned, and come to the device in a few copies: from
other memory each would hold the thread that issues it until it is through. On the device small tensors share memory,
and so do a few neighbours of a long list: whoever keeps the labels does not keep the pictures.
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
from minato_gpu.device.loads import Load, Port
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
)  # sequences, some of them
_Items = list[tuple[Value, Value]]


class ValueLoad(Load):
    """Loads what ``make`` returns: any nesting of containers, tensors, and what stays as it is.

    ``make`` is called once for each attempt. It is kept until the batch is handed over: what it is made of counts on
    the host until then, and a batch that has to leave the device comes from there once more. ``nbytes``: what the batch
    takes on the host, which is not what its tensors take.
    """

    def __init__(self, make: Callable[[], Value], nbytes: int) -> None:
        super().__init__(nbytes)
        self._make = make
        self._value: Value = None
        self._used: list[torch.Tensor] = []  # memory that the consumer's stream will use

    def issue(self, port: Port) -> None:
        """See Load. At most ``copies.MOST`` copies, and as many as the arena's pinned pieces ask for."""
        self.unload(port)
        try:
            value = self._make()
            found: list[torch.Tensor] = []

            def note(tensor: torch.Tensor) -> torch.Tensor:
                found.append(tensor)
                return tensor

            mapped(value, note)
            copied = iter(self._copy(port, [tensor for tensor in found if _is_plain(tensor)]))

            def loaded(tensor: torch.Tensor) -> torch.Tensor:
                if _is_plain(tensor):
                    return next(copied)
                return tensor if tensor.device.type != "cpu" else self._moved(port.accelerator, tensor)

            self._value = mapped(value, loaded)
        except BaseException:  # what found memory is not to keep it while the rest waits for some
            self.unload(port)
            raise
        self.measured = sum(part.numel() * part.element_size() for part in self._used)

    def _moved(self, accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
        """By PyTorch itself."""
        moved = tensor.to(accelerator.device)
        self._used += [part for part in strided_parts(moved.detach()) if part.numel()]
        return moved

    def _copy(self, port: Port, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors on the device, in the same order."""
        found: dict[int, torch.Tensor] = {}
        for numbers in _groups([tensor.nbytes for tensor in tensors]):
            places, total = side_by_side([tensors[number].nbytes for number in numbers])
            block, staging = port.host.allocate(total)
            self.keep.append(staging)
            memory = port.accelerator.empty(total)
            self._used.append(memory)
            for at, number in zip(places, numbers, strict=True):
                tensor = without_gaps(tensors[number])
                end = at + tensor.nbytes
                np.copyto(staging[at:end], bytes_of(tensor).numpy())
                found[number] = memory[at:end].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
                port.slices.between()
            port.copy(memory, [CopyRange(block, 0, total)], most=1 << 16)
        return [found[number] for number in range(len(tensors))]

    def unload(self, port: Port) -> None:
        """See Load. Nothing has to be fetched."""
        self._value, self._used = None, []

    def hand_over(self, accelerator: Accelerator) -> Value:
        """See Load."""
        assert self.event is not None
        accelerator.wait(self.event)
        for memory in self._used:
            accelerator.used_here(memory)
        value, self._value, self._used, self._make = self._value, None, [], lambda: None
        return value


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are all there is to it."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    on_host = tensor.device.type == "cpu" and plain and tensor.numel() > 0
    return on_host and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Which tensors share memory, at most ``MOST`` groups: the small ones, and neighbours among the others."""
    whole = sum(sizes)
    small = [number for number, nbytes in enumerate(sizes) if is_small(nbytes, whole)]
    large = [number for number, nbytes in enumerate(sizes) if not is_small(nbytes, whole)]
    each = -(-len(large) // (MOST - 1)) or 1
    return [group for group in (small, *(large[at : at + each] for at in range(0, len(large), each))) if group]


def mapped(value: Value, function: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    """A nested batch with ``function`` applied to its tensors, in mappings and sequences of any class; everything else
    as it is. ``value`` does not change."""
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
    return _like(value, items, after)


def _like(value: Value, items: _Items, after: _Items) -> Value:
    """A container like ``value``, of which these are the items, with others in their places: where it can be written to
    a copy, which keeps its attributes; else what its class makes of them, or a plain dict or list."""
    with suppress(Exception):  # runs code of its class
        copied = copy.copy(value)
        _put(copied, after)
        if all(value[key] is item for key, item in items):
            return copied
        _put(value, items)  # the copy has no items of its own
    new = dict(after) if isinstance(value, Mapping) else [item for _, item in after]
    if isinstance(value, tuple):
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    with suppress(Exception):
        return type(value)(new)
    return new


def _put(container: Value, items: _Items) -> None:
    for key, item in items:
        container[key] = item
