"""Photographs prepared by torch on a GPU, as users of PyTorch, SPDL and torchvision do it.

PyTorch's and SPDL's workers send decoded crops of any size; these are resized, mirrored and normalised in torch. The
same as the pipeline's own functions: bilinear between the four nearest pixels, no antialiasing, rounded to whole
levels. A batch is resized by four gathers rather than picture by picture, whose hundreds of kernels would take longer.
For torchvision, workers send the files' bytes; nvJPEG decodes them, and pictures are cut and resized one by one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.compare.workloads import INDEX
from benchmarks.peers import Job
from benchmarks.session.settings import settings_of
from minato_gpu.extras import from_extra
from minato_gpu.parity import whole_tolerance
from minato_gpu.samples import sample_seed
from minato_gpu.stages import Tolerance
from pipelines.decoding import decode_box
from pipelines.headers import read_header
from pipelines.image_classification import MEAN, STD

with from_extra("bench"):
    import cv2

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


# --- what workers make of a sample, and batches that are ready to travel ----------------------------------------------


class Drawn:
    """The samples of a job with the pipeline's own draws, before anything is decoded."""

    def __init__(self, job: Job) -> None:
        self._job = job
        names = [stage.name for stage in job.pipeline.stages]
        self._decode, self._flip = names.index("decode"), names.index("flip")

    def __len__(self) -> int:
        return len(self._job.source)

    def draw(self, index: int) -> dict[str, Any]:
        """encoded: the file's bytes; box: of the upright picture, top, left, height, width; mirror; label; index."""
        pipeline = self._job.pipeline
        seed = sample_seed(self._job.dataset.seed, 0, index, 0)
        fields = pipeline.run(self._job.source[index], seed, stop=self._decode)
        return {
            "encoded": fields["encoded"],
            "box": tuple(int(n) for n in fields["box"]),
            "mirror": bool(pipeline.draw(self._flip, fields, seed)["mirror"]),
            "label": int(fields["label"]),
            INDEX: index,
        }


class Files(Drawn):
    """A map-style data set of files' bytes. ``plain``: a JPEG without an Exif orientation, which nvJPEG decodes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.draw(index)
        encoded = sample["encoded"].tobytes()
        return {**sample, "plain": encoded[:2] == b"\xff\xd8" and read_header(encoded).orientation == 1}


class Crops(Drawn):
    """A map-style data set of decoded crops, uint8 [height, width, 3], with what is left to be done to them.

    ``decoder``: "opencv" decodes the whole photograph and cuts; "nvimgcodec", this project's own, only the crop.
    ``squares``: they are resized here, so that less travels and less is left.
    """

    def __init__(self, job: Job, decoder: str, *, squares: bool, size: int) -> None:
        super().__init__(job)
        self._decoder, self._squares, self._size = decoder, squares, size

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.draw(index)
        pixels = self._cut(sample.pop("encoded"), sample.pop("box"))
        if self._squares:
            pixels = cv2.resize(pixels, (self._size, self._size), interpolation=cv2.INTER_LINEAR)
        return {"pixels": pixels, **sample}

    def _cut(self, encoded: Any, box: tuple[int, ...]) -> Any:
        top, left, height, width = box
        if self._decoder == "nvimgcodec":
            return decode_box(encoded, (top, left, height, width))
        picture = cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB)
        if picture is None:
            raise ValueError("OpenCV cannot decode this picture")
        return picture[top : top + height, left : left + width]


def packed(samples: list[dict[str, Any]], *, squares: bool) -> Batch:
    """Crops as one batch (see ``Batch``); a worker process makes it in shared memory, as torch's collate
    function does."""
    crops = [sample["pixels"] for sample in samples]
    extent = torch.tensor([crop.shape[:2] for crop in crops])
    counts = extent.prod(1)
    if squares:
        pixels = _room((len(crops), *crops[0].shape))
        np.stack(crops, out=pixels.numpy())
    else:
        pixels = _room((int(counts.sum()), 3))
        np.concatenate([crop.reshape(-1, 3) for crop in crops], out=pixels.numpy())
    return {"pixels": pixels, "start": counts.cumsum(0) - counts, "extent": extent, **_columns(samples)}


def joined(samples: list[dict[str, Any]]) -> Batch:
    """Files' bytes as one batch. encoded: uint8, one file after the other; length: int64 [batch], the bytes of each;
    box: int64 [batch, 4]; plain: bool [batch]; the rest as in ``Batch``."""
    files = [sample["encoded"] for sample in samples]
    encoded = _room((sum(len(file) for file in files),))
    np.concatenate(files, out=encoded.numpy())
    length = torch.tensor([len(file) for file in files])
    return {"encoded": encoded, "length": length, **_columns(samples, "box", "plain")}


def _columns(samples: list[dict[str, Any]], *more: str) -> Batch:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in (*more, "mirror", "label", INDEX)}


def _room(shape: tuple[int, ...]) -> torch.Tensor:
    if torch.utils.data.get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(int(np.prod(shape)))
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


class Packing:
    """``packed`` as a collate function that pickles."""

    def __init__(self, *, squares: bool) -> None:
        self.squares = squares

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        return packed(samples, squares=self.squares)


# --- torchvision ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TorchvisionGpu:
    """``torchvision.io.decode_jpeg`` and ``v2.functional.resized_crop``, without antialiasing.

    Boxes and mirroring are the pipeline's, so that the pictures can be compared with it; but nvJPEG, as torchvision
    calls it, upsamples chroma without smoothing, so that they differ by more than other candidates' on a GPU. What
    ``decode_jpeg`` does not decode there or not upright (PNG, WebP, an Exif orientation) ``decode_image`` decodes on
    the host. ``v2.functional.normalize`` would copy its statistics to the GPU, and wait, for every batch; the
    arithmetic of ``finished`` is the same. ``pinned``: the bytes are copied to pinned memory before.
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
    """Files' bytes (see ``joined``) as a finished batch on the device."""
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
