"""Who is measured: this loader on each of its lanes, and its peers whose GPU transforms are torch's (``dali`` has the
others).

All prepare the same samples: PyTorch's, SPDL's and torchvision's workers read and draw by the pipeline's own functions,
so that their batches can be compared with the pipeline's. PyTorch's and SPDL's workers decode by OpenCV, cut and
resize; the rest is done on the GPU. For torchvision, workers send the files' bytes; nvJPEG decodes them, and pictures
are cut and resized one by one. This loader, DALI and torchvision upsample chroma as nvJPEG does by default, without
smoothing; OpenCV smooths it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from benchmarks.compare.workloads import INDEX
from benchmarks.peers import Job
from minato_gpu import DataLoader as MinatoDataLoader
from minato_gpu.arguments import LaneName
from minato_gpu.engine import builder
from minato_gpu.lab.parity import whole_tolerance
from minato_gpu.pipeline.stages import Tolerance
from minato_gpu.samples import sample_seed
from minato_gpu.util.messages import from_extra
from pipelines.headers import read_header
from pipelines.image_classification import MEAN, STD
from pipelines.photograph_stages import GEOMETRIC

with from_extra("bench"):
    import cv2


@dataclass(frozen=True)
class Contender:
    """A loader with its settings. ``package``: what it needs. ``ordered``, ``own_draws``: see ``work.Taken.check``."""

    package: ClassVar[str]
    ordered: ClassVar[bool] = True
    own_draws: ClassVar[bool] = False
    fancy_upsampling: ClassVar[bool] = True  # of the pipeline that its pictures are compared with

    name: str

    def settings(self) -> dict[str, Any]:
        """What was chosen for it."""
        return {name: value for name, value in asdict(self).items() if name not in ("name", "size")}

    def make(self, job: Job, device: str) -> Iterable[Any]:
        """Its batches of the job, on the device."""
        raise NotImplementedError

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        """How far pictures may be from the CPU implementation's; None: not at all."""
        return None


@dataclass(frozen=True)
class Ours(Contender):
    """``minato_gpu.DataLoader``, with bounded lateness.

    The device lane by itself has as many threads of DALI as beside a CPU lane: the sum of the two is then what both
    could make, and a core is not counted twice.
    """

    package: ClassVar[str] = "minato_gpu"
    fancy_upsampling: ClassVar[bool] = False

    lanes: tuple[LaneName, ...]
    workers: int
    device_memory_budget: int | None = None

    def make(self, job: Job, device: str) -> Any:
        """In a process of its own, whose settings it changes."""
        if device == "cuda" and self.lanes == ("device",):
            mock.patch.object(builder, "usable_cores", return_value=builder.THREADS_BESIDE).start()
        return MinatoDataLoader(
            job.source,
            job.batch_size,
            num_workers=self.workers,
            lanes=self.lanes,
            in_order=False,
            generator=torch.Generator().manual_seed(0),
            pipeline=job.pipeline,
            device=device if device == "cuda" else None,
            device_memory_budget=self.device_memory_budget,
        )

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        return whole_tolerance(job.pipeline, device, job.pipeline.host_prefix) if "device" in self.lanes else None


def ours(workers: int) -> tuple[Ours, Ours, Ours]:
    """All-CPU, all-device, hybrid."""
    hybrid = Ours("hybrid", ("cpu", "device"), workers)
    return Ours("cpu", ("cpu",), workers), Ours("device", ("device",), workers), hybrid


# --- peers whose workers decode, and whose GPU does the rest in torch --------------------------------------------


@dataclass(frozen=True)
class TorchGpu(Contender):
    """``torch.utils.data.DataLoader``, batches out of order, pinned; the rest on the GPU one batch ahead."""

    package: ClassVar[str] = "torch"
    ordered: ClassVar[bool] = False

    workers: int
    size: int

    def make(self, job: Job, device: str) -> Iterable[Any]:
        crops: Any = Crops(job, self.size)
        return brought(_loader(crops, job, self.workers, default_collate, pin=device == "cuda"), device, finished)

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        return GEOMETRIC


@dataclass(frozen=True)
class SpdlGpu(Contender):
    """SPDL's pipeline: samples decoded by threads, gathered, brought to the GPU by SPDL's transfer in a thread of its
    own; the rest there, one batch ahead."""

    package: ClassVar[str] = "spdl.pipeline"
    ordered: ClassVar[bool] = False

    threads: int
    size: int

    def make(self, job: Job, device: str) -> Iterable[Any]:
        from spdl.pipeline import PipelineBuilder

        crops = Crops(job, self.size)
        prepare: Any = crops.__getitem__
        builder: PipelineBuilder[Any, Any] = PipelineBuilder()
        builder.add_source(range(len(crops)))
        builder.pipe(prepare, concurrency=self.threads)
        builder.aggregate(job.batch_size, drop_last=True)
        builder.pipe(default_collate, executor=ThreadPoolExecutor(2), concurrency=2)
        if device == "cuda":
            from spdl.io import transfer_tensor_h2d

            builder.pipe(transfer_tensor_h2d, executor=ThreadPoolExecutor(1))
        pipeline = builder.add_sink(3).build(num_threads=self.threads, use_thread_output_queue=True)
        pipeline.start()
        return brought(pipeline.get_iterator(), device, finished)

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        return GEOMETRIC


@dataclass(frozen=True)
class TorchvisionGpu(Contender):
    """``torchvision.io.decode_jpeg`` and ``v2.functional.resized_crop``, without antialiasing.

    Boxes and mirroring are the pipeline's, so that the pictures can be compared with it; but nvJPEG, as torchvision
    calls it, upsamples chroma without smoothing, so that they differ by more than other candidates' on a GPU. What
    ``decode_jpeg`` does not decode there or not upright (PNG, WebP, an Exif orientation) ``decode_image`` decodes on
    the host. ``v2.functional.normalize`` would copy its statistics to the GPU, and wait, for every batch; the
    arithmetic of ``finished`` gives the same.
    """

    package: ClassVar[str] = "torchvision"
    ordered: ClassVar[bool] = False

    workers: int
    size: int

    def make(self, job: Job, device: str) -> Iterable[Any]:
        files: Any = Files(job)
        return brought(_loader(files, job, self.workers, joined), device, lambda batch: decoded(batch, self.size))

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        return whole_tolerance(job.pipeline, device, 0)


def _loader(dataset: Any, job: Job, workers: int, collate: Any, *, pin: bool = False) -> DataLoader[Any]:
    return DataLoader(dataset, job.batch_size, num_workers=workers, collate_fn=collate, pin_memory=pin, in_order=False)


# --- what workers make of a sample -------------------------------------------------------------------------------


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


class Crops(Drawn):
    """A map-style data set of crops as squares, pixels: uint8 [size, size, 3], decoded by OpenCV."""

    def __init__(self, job: Job, size: int) -> None:
        super().__init__(job)
        self._size = size

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.draw(index)
        picture = cv2.imdecode(sample.pop("encoded"), cv2.IMREAD_COLOR_RGB)
        if picture is None:
            raise ValueError("OpenCV cannot decode this picture")
        top, left, height, width = sample.pop("box")
        crop = picture[top : top + height, left : left + width]
        return {"pixels": cv2.resize(crop, (self._size, self._size), interpolation=cv2.INTER_LINEAR), **sample}


class Files(Drawn):
    """A map-style data set of files' bytes. ``plain``: a JPEG without an Exif orientation, which nvJPEG decodes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.draw(index)
        encoded = sample["encoded"].tobytes()
        return {**sample, "plain": encoded[:2] == b"\xff\xd8" and read_header(encoded).orientation == 1}


def joined(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Files' bytes as one batch. encoded: uint8, one file after the other; length: int64 [batch], the bytes of each;
    box: int64 [batch, 4]; plain, mirror: bool [batch]; label, index: int64 [batch]."""
    files = [sample["encoded"] for sample in samples]
    columns = {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0] if name != "encoded"}
    length = torch.tensor([len(file) for file in files])
    return {"encoded": torch.from_numpy(np.concatenate(files)), "length": length, **columns}


# --- what torch does on the device -------------------------------------------------------------------------------


def brought(
    batches: Iterable[Any], device: str, finish: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
) -> Iterator[dict[str, Tensor]]:
    """The batches, moved to the device and finished there. On a GPU one batch ahead of the consumer, on a stream of its
    own, so that copies and transforms do not wait for the step before."""
    if device == "cpu":
        yield from map(finish, batches)
        return
    stream = torch.cuda.Stream()
    waiting: tuple[dict[str, Tensor], Any] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            there = {name: value.to(device, non_blocking=True) for name, value in batch.items() if name in _MOVED}
            for value in there.values():
                value.record_stream(stream)  # SPDL made it on another
            ready = finish({**batch, **there}), stream.record_event()
        if waiting is not None:
            yield _handed(*waiting)
        waiting = ready
    if waiting is not None:
        yield _handed(*waiting)


_MOVED = ("pixels", "mirror", "label", INDEX)  # the others are read on the host


def _handed(batch: dict[str, Tensor], event: Any) -> dict[str, Tensor]:
    """The batch, safe on the consumer's stream, for as long as that uses it."""
    current = torch.cuda.current_stream()
    current.wait_event(event)
    for value in batch.values():
        value.record_stream(current)
    return batch


def finished(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """image: float32 [batch, 3, size, size], channels last in memory, of pixels uint8 [batch, size, size, 3] and mirror
    bool [batch]; label and index."""
    pixels = batch["pixels"]
    image = torch.where(batch["mirror"][:, None, None, None], pixels.flip(2), pixels).float()
    mean, scale = _statistics(pixels.device)
    image = image.sub_(mean).mul_(scale).permute(0, 3, 1, 2)
    return {"image": image, "label": batch["label"], INDEX: batch[INDEX]}


@cache  # a copy to the device for every batch would wait for it
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """What to take off a level, and what to multiply it by, for each channel."""
    mean, std = (torch.tensor(values, dtype=torch.float32) * 255 for values in (MEAN, STD))
    return mean.to(device), (1 / std).to(device)


def decoded(batch: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Files' bytes (see ``joined``) as a finished batch where ``mirror`` is."""
    resized_crop = importlib.import_module("torchvision.transforms.v2.functional").resized_crop
    pairs = zip(_pictures(batch, batch["mirror"].device), batch["box"].tolist(), strict=True)
    squares = [resized_crop(picture, *box, [size, size], antialias=False) for picture, box in pairs]
    return finished({**batch, "pixels": torch.stack(squares).permute(0, 2, 3, 1)})


def _pictures(batch: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
    """The pictures, uint8 [3, height, width]."""
    io = importlib.import_module("torchvision.io")
    rgb = io.ImageReadMode.RGB
    files = list(zip(batch["encoded"].split(batch["length"].tolist()), batch["plain"].tolist(), strict=True))
    if device.type == "cuda":
        # It decodes on a stream of its own, which does not wait for the current one, into memory of the current one's
        # that may still be read there: what was freed after the batch before.
        torch.cuda.current_stream().synchronize()
    jpegs = [file for file, plain in files if plain]
    found = iter(io.decode_jpeg(jpegs, mode=rgb, device=device.type) if jpegs else ())
    return [
        next(found) if plain else io.decode_image(file, mode=rgb, apply_exif_orientation=True).to(device)
        for file, plain in files
    ]
