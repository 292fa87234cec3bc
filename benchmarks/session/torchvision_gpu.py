"""torchvision as its users run it on a GPU: files' bytes from workers, decoded by nvJPEG, cut and resized picture by
picture, the rest a batch at a time."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.compare.workloads import INDEX
from benchmarks.peers import Job
from benchmarks.session.candidates import settings_of
from benchmarks.session.crops import Files, joined
from benchmarks.session.transforms import Batch, brought, finished
from minato_gpu.parity import whole_tolerance
from minato_gpu.stages import Tolerance


@dataclass(frozen=True)
class TorchvisionGpu:
    """``torchvision.io.decode_jpeg`` and ``v2.functional.resized_crop``, without antialiasing.

    Boxes and mirroring are the pipeline's, so that the pictures can be compared with it; but nvJPEG, as torchvision
    calls it, upsamples chroma without smoothing, so that they differ by more than other candidates' on a GPU. What
    ``decode_jpeg`` does not decode there or not upright (PNG, WebP, an Exif orientation) ``decode_image`` decodes on
    the host. ``v2.functional.normalize`` would copy its statistics to the GPU, and wait, for every batch; the
    arithmetic of ``transforms.finished`` is the same. ``pinned``: the bytes are copied to pinned memory before.
    """

    name: str
    workers: int
    size: int
    prefetch: int = 2
    pinned: bool = False
    package: str = "torchvision"
    ordered: bool = False
    own_draws: bool = False

    def settings(self) -> dict[str, Any]:
        return settings_of(self)

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        return whole_tolerance(job.pipeline, device, 0)

    def make(self, job: Job, device: str) -> Iterable[Any]:
        loader: DataLoader[Any] = DataLoader(
            Files(job),  # type: ignore[arg-type]
            job.batch_size,
            num_workers=self.workers,
            collate_fn=joined,
            pin_memory=self.pinned and device == "cuda",
            prefetch_factor=self.prefetch,
            in_order=False,
        )
        return brought(loader, device, self.size, decoded)


def decoded(batch: Batch, device: str, size: int) -> dict[str, Tensor]:
    """Files' bytes (see ``crops.joined``) as a finished batch on the device."""
    resized_crop = importlib.import_module("torchvision.transforms.v2.functional").resized_crop
    pictures = _pictures(batch, device)
    boxes = batch["box"].tolist()
    squares = [
        resized_crop(picture, *box, [size, size], antialias=False) for picture, box in zip(pictures, boxes, strict=True)
    ]
    there = {name: batch[name].to(device, non_blocking=True) for name in ("mirror", "label", INDEX)}
    return finished({"pixels": torch.stack(squares).permute(0, 2, 3, 1), **there}, size)


def _pictures(batch: Batch, device: str) -> list[Tensor]:
    """The pictures, uint8 [3, height, width]."""
    io = importlib.import_module("torchvision.io")
    rgb = io.ImageReadMode.RGB
    files, plain = batch["encoded"].split(batch["length"].tolist()), batch["plain"].tolist()
    if device != "cpu":
        # It decodes on a stream of its own, which does not wait for the current one, into memory of the current one's
        # that may still be read there: what was freed after the batch before.
        torch.cuda.current_stream().synchronize()
    jpegs = [file for file, is_plain in zip(files, plain, strict=True) if is_plain]
    found = iter(io.decode_jpeg(jpegs, mode=rgb, device=device) if jpegs else ())
    return [
        next(found) if is_plain else io.decode_image(file, mode=rgb, apply_exif_orientation=True).to(device)
        for file, is_plain in zip(files, plain, strict=True)
    ]
