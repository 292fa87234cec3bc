"""What PyTorch's and SPDL's users do on the GPU: crops of any size resized, mirrored, normalised, in torch.

The same as the pipeline's own functions: bilinear between the four nearest pixels, no antialiasing, rounded to whole
levels. A batch is resized by four gathers rather than picture by picture, whose hundreds of kernels would take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare.workloads import INDEX
from pipelines.image_classification import MEAN, STD

_AT_ONCE = 64  # pictures that are resized together: bounds what that takes of the device's memory

Batch = Mapping[str, Tensor]
"""pixels: uint8 [n, 3], the crops' pixels one after the other, or [batch, size, size, 3]; start: int64 [batch], each
crop's first pixel; extent: int64 [batch, 2], its height and width; mirror: bool [batch]; label and index: int64."""


def finished(batch: Batch, size: int) -> dict[str, Tensor]:
    """image: float32 [batch, 3, size, size], channels last in memory; label and index as they are."""
    pixels, mirror = batch["pixels"], batch["mirror"]
    if pixels.ndim == 4:
        image = torch.where(mirror[:, None, None, None], pixels.flip(2), pixels).float()
    else:
        parts = zip(*(batch[name].split(_AT_ONCE) for name in ("start", "extent", "mirror")), strict=True)
        image = torch.cat([resized(pixels, start, extent, turned, size) for start, extent, turned in parts])
    mean, scale = _statistics(pixels.device)
    return {
        "image": image.sub_(mean).mul_(scale).permute(0, 3, 1, 2),
        "label": batch["label"],
        INDEX: batch[INDEX],
    }


def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """What to take off a level, and what to multiply it by, for each channel."""
    found = _known.get(device)
    if found is None:
        mean, std = (torch.tensor(values, dtype=torch.float32) * 255 for values in (MEAN, STD))
        found = _known[device] = (mean.to(device), (1 / std).to(device))
    return found


_known: dict[torch.device, tuple[Tensor, Tensor]] = {}  # a copy to the device for every batch would wait for it


def resized(pixels: Tensor, start: Tensor, extent: Tensor, mirror: Tensor, size: int) -> Tensor:
    """Crops (see ``Batch``) as levels, float32 [batch, size, size, 3]."""
    above, below, down = _neighbours(extent[:, :1], size)
    left, right, across = _neighbours(extent[:, 1:], size)
    left, right, across = (torch.where(mirror[:, None], each.flip(1), each) for each in (left, right, across))
    down, across = down[:, :, None, None], across[:, None, :, None]

    def row(y: Tensor) -> Tensor:
        first = (start[:, None] + y * extent[:, 1:])[:, :, None]
        one, other = (pixels[first + x[:, None, :]].float() for x in (left, right))
        return one.lerp_(other, across)

    return row(above).lerp_(row(below), down).round_()


def _neighbours(extent: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each place of ``size``: the pixel before, the pixel after, and how far from the first to the second."""
    places = torch.arange(size, device=extent.device, dtype=torch.float32) + 0.5
    at = (places * (extent / size) - 0.5).clamp_(min=0)
    last = extent - 1
    before = torch.minimum(at.long(), last)
    return before, torch.minimum(before + 1, last), at - before


def moved(batch: Batch, device: str, size: int) -> dict[str, Tensor]:
    """The batch, moved to the device and finished there, on the current stream."""
    there = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    if device != "cpu":
        for value in there.values():
            value.record_stream(torch.cuda.current_stream())  # SPDL made it on another
    return finished(there, size)


def brought(
    batches: Iterable[Any], device: str, size: int, make: Callable[[Any, str, int], dict[str, Tensor]] = moved
) -> Iterator[dict[str, Tensor]]:
    """The batches as ``make`` makes them on the device. On a GPU one batch ahead of the consumer, on a stream of its
    own, so that copies and transforms do not wait for the step before."""
    if device == "cpu":
        for batch in batches:
            yield make(batch, device, size)
        return
    stream = torch.cuda.Stream()
    waiting: tuple[dict[str, Tensor], Any] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            ready = make(batch, device, size), stream.record_event()
        if waiting is not None:
            yield _handed(*waiting)
        waiting = ready
    if waiting is not None:
        yield _handed(*waiting)


def _handed(batch: dict[str, Tensor], event: Any) -> dict[str, Tensor]:
    """The batch, safe on the consumer's stream, for as long as that uses it."""
    current = torch.cuda.current_stream()
    current.wait_event(event)
    for value in batch.values():
        value.record_stream(current)
    return batch
