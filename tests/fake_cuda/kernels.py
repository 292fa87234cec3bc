"""PyTorch's CUDA kernels, computed by its CPU kernels on the same memory, after waiting for the stream."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.fake_cuda.runtime import LIBRARY

# These need no kernel; so do views.
_KEPT = {
    *("empty.memory_format", "empty_strided", "_efficientzerotensor", "record_stream", "is_pinned", "_pin_memory"),
    *("_local_scalar_dense", "is_set_to", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset"),
    *("set_.source_Tensor", "resize_", "_resize_output_", "_copy_from", "_copy_from_and_resize"),
}
_CYCLES_PER_US = 1755


def install(module: ModuleType) -> None:
    """Replaces PyTorch's kernels, before anything has asked CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of kernels that are replaced
        _install()


def _install() -> None:
    torch.backends.cudnn.enabled = False
    torch.backends.cudnn.version = lambda: 91900
    torch.cuda._sleep = lambda cycles: LIBRARY.fake_cuda_sleep(_stream(), cycles // _CYCLES_PER_US)
    generator = torch.Generator()
    kept = torch.library.get_kernel("aten::copy_", "CUDA")
    for name in {*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), "aten::copy_"}:
        space, _, full = name.partition("::")
        base, _, overload = full.partition(".")
        if space != "aten" or full in _KEPT:
            continue
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")
        if not _is_view(operator):
            ours = {"copy_": _copy(kept), "_foreach_copy_": _copy_each}
            _LIBRARY.impl(name, ours.get(full) or _kernel(operator, generator), "CUDA")


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, of the same memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())


def uploaded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device, which is there at once."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")
    alias(made).copy_(tensor)
    return made


_LIBRARY = torch.library.Library("aten", "IMPL")


def _is_view(operator: Any) -> bool:
    returns = operator._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _kernel(operator: Any, generator: torch.Generator) -> Callable[..., Any]:
    """The operator's kernel. Draws have a generator of their own: the CPU's global one is the user's."""
    draws = any(argument.name == "generator" for argument in operator._schema.arguments)
    tensors = [str(argument.type) == "Tensor" for argument in operator._schema.arguments]

    def compute(*args: Any, **kwargs: Any) -> Any:
        LIBRARY.cudaStreamSynchronize(_stream())
        seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def down(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                there = alias(value)
                seen[id(there)] = there, value
                return there
            if isinstance(value, torch.Generator):
                return generator
            return torch.device("cpu") if isinstance(value, torch.device) else value

        def up(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return seen[id(value)][1] if id(value) in seen else uploaded(value)

        if draws:
            kwargs["generator"] = generator
        # a number in the place of a tensor, as in fmod_(1.0), comes as such
        args = tuple(
            torch.tensor(value) if is_tensor and isinstance(value, (int, float)) else value
            for value, is_tensor in zip(args, tensors, strict=False)
        )
        found = _INSTEAD.get(operator, operator)(*tree_map(down, args), **tree_map(down, kwargs))
        for there, value in seen.values():
            if there.size() != value.size():  # an output that has been resized
                value.resize_(there.size())
                alias(value).copy_(there)
        return tree_map(up, found)

    return compute


def _conv_depthwise(
    self: torch.Tensor, weight: torch.Tensor, size: Any, bias: Any, stride: Any, padding: Any, dilation: Any
) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.conv2d.default(self, weight, bias, stride, padding, dilation, self.shape[1])
    return made


_INSTEAD = {torch.ops.aten._conv_depthwise2d.default: _conv_depthwise}  # of kernels that the CPU has not


def _copy(kept: Any) -> Callable[..., torch.Tensor]:
    """PyTorch's own copies where no kernel is needed: they say most of streams."""

    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        plain = self.is_contiguous() and source.is_contiguous()
        if plain and self.dtype == source.dtype and self.size() == source.size():
            keys = torch._C._dispatch_keys(self if self.is_cuda else source)
            made: torch.Tensor = kept.call_boxed(keys, self, source, non_blocking)
            return made
        LIBRARY.cudaStreamSynchronize(_stream())
        here, there = (alias(one) if one.is_cuda else one for one in (self, source))
        here.copy_(there)
        return self

    return copy


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


def install_pictures(module: Any) -> None:
    """Lets ``decode_jpeg`` of ``torchvision.io.image`` decode for a CUDA device, by its decoder for the CPU."""
    decode = module.decode_jpeg

    @functools.wraps(decode)
    def decode_jpeg(input: Any, mode: Any = module.ImageReadMode.UNCHANGED, device: Any = "cpu", **more: Any) -> Any:
        decoded = decode(input, mode, "cpu", **more)
        if torch.device(device).type == "cpu":
            return decoded
        return [uploaded(one) for one in decoded] if isinstance(decoded, list) else uploaded(decoded)

    module.decode_jpeg = decode_jpeg
