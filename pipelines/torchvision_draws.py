"""What torchvision's transforms draw for a sample, before there is a picture.

Each transform's own ``forward`` is called with a stand-in for the picture, which has its size and no pixels, and with
the sample's targets. What it draws for the picture is kept, and the targets are finished by it.

Decision: draws come from a generator that is put in the place of torch's global one, for the calling thread alone
(``OwnDraws``). Rejected: seeding the global generator, which all threads of a process share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from minato_gpu.samples import Value
from minato_gpu.util.messages import from_extra

from .torchvision_classes import RESIZING, TO_SIZE, class_name

with from_extra("torchvision"):
    from torchvision import tv_tensors
    from torchvision.transforms import v2

_DRAWING = frozenset(
    (
        *("rand", "randint", "randn", "randn_like", "randperm", "normal", "multinomial", "bernoulli", "poisson"),
        *("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_"),
        *("_sample_dirichlet", "_standard_gamma"),
    )
)


class OwnDraws(TorchFunctionMode):
    """Context in which what the calling thread draws from torch's global CPU generator comes from ``generator``."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _DRAWING and (kwargs is None or kwargs.get("generator") is None):
            kwargs = {**(kwargs or {}), "generator": self._generator}
        return func(*args, **(kwargs or {}))


def recorders_of(transforms: Sequence[Any], targets: Sequence[str]) -> tuple[Any, ...]:
    """Copies of the transforms whose ``forward`` is given a stand-in for the picture (see ``recorded``); None in the
    place of those that draw nothing, have no targets and leave the size as it is."""
    copies = []
    for transform in transforms:
        kind = type(transform)
        draws = kind.make_params is not v2.Transform.make_params or kind.forward is not v2.Transform.forward
        if draws or targets or class_name(transform) in {*RESIZING, "Grayscale", "RGB"}:
            recorder = copy.copy(transform)
            recorder.transform = partial(_record, transform)
            copies.append(recorder)
        else:
            copies.append(None)
    return tuple(copies)


def recorded(
    recorders: Sequence[Any], shape: Sequence[int], targets: Sequence[Value]
) -> tuple[tuple[Value, ...], list[Value]]:
    """Returns what each transform draws for a picture of this shape, and the finished targets.

    None stands for a transform that leaves this picture as it is, {} for one whose recorder is None.
    """
    sample: tuple[Any, ...] = (_stand_in(shape), *targets)
    drawn: list[Value] = []
    for recorder in recorders:
        if recorder is None:
            drawn.append({})
            continue
        image = sample[0]
        image.drawn = None
        sample = called(recorder, sample)
        drawn.append(image.drawn)
    return tuple(drawn), list(sample[1:])


_PIXEL = torch.zeros((), dtype=torch.uint8)


def _stand_in(shape: Sequence[int]) -> Any:
    """A picture of one pixel, which is repeated without taking memory."""
    return _PIXEL.expand(*shape).as_subclass(tv_tensors.Image)


def _record(transform: Any, value: Any, params: Mapping[str, Any]) -> Any:
    """In the place of ``transform.transform``: a stand-in notes what was drawn, and changes its size and type alone."""
    if not hasattr(value, "drawn"):
        return transform.transform(value, params)
    value.drawn = params
    name = class_name(transform)
    if name == "ToPureTensor":
        return value.as_subclass(torch.Tensor)
    channels, height, width = value.shape
    if name in ("Grayscale", "RGB"):
        channels = getattr(transform, "num_output_channels", 3)
    elif name in TO_SIZE:
        height, width = transform.size
    elif name in RESIZING:
        height, width = size_behind(transform, params, height, width)
    else:
        return value
    return _stand_in((channels, height, width)).as_subclass(type(value))


def size_behind(transform: Any, params: Mapping[str, Any], height: int, width: int) -> tuple[int, int]:
    """The size of a picture behind ``transform``: torchvision works it out for points in it, too."""
    if class_name(transform) == "Pad":  # of points by a constant alone
        padding = transform.padding if isinstance(transform.padding, list) else [transform.padding]
        left, top, right, bottom = (padding * 4)[:4]
        return height + top + bottom, width + left + right
    points = tv_tensors.KeyPoints(torch.zeros(0, 2), canvas_size=(height, width))
    after = transform.transform(points, params).canvas_size
    return int(after[0]), int(after[1])


def called(transform: Callable[..., Any], sample: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what the transform makes of a picture and its targets."""
    made = transform(*sample)
    return tuple(made) if len(sample) > 1 else (made,)
