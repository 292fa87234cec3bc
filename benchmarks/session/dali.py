"""DALI as its users run it on a GPU: its own reader and random operators, its own PyTorch iterator.

Three of NVIDIA's ways: ``DaliGpu`` decodes on the GPU, ``DaliCpu`` on the CPU, and ``DaliDynamic`` calls DALI's
operators one by one. All draw by themselves: their batches are the same work as the pipeline's, not the same pixels.

NVIDIA's example for ResNet-50 (docs/examples/use_cases/pytorch/resnet50 in DALI's repository) has nvJPEG allocate ahead
for the largest of ImageNet's photographs, today by the engine's hints, earlier by padding; its sizes are
enough for the session's photographs too. DALI's cache of decoded pictures is left out: nobody else has one here.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from benchmarks.compare.dali import normalised, resized, told_by
from benchmarks.compare.workloads import INDEX
from benchmarks.peers import Job
from benchmarks.session.settings import settings_of
from minato_gpu.device import nvjpeg
from minato_gpu.stages import Tolerance

HINTS = {"preallocate_width_hint": 5980, "preallocate_height_hint": 6430}
"""Of NVIDIA's example: pixels, for nvJPEG's engine."""

PADDING = {"device_memory_padding": 211_025_920, "host_memory_padding": 140_544_512}
"""Of an earlier version of that example: bytes for each thread, for nvJPEG without the engine; ten times DALI's own."""


@dataclass(frozen=True)
class Dali:
    """What all of them have: ``threads`` of DALI's, which read, decode headers, and decode what the GPU does not."""

    name: str
    threads: int
    package: str = "nvidia.dali"
    ordered: bool = True
    own_draws: bool = True

    def settings(self) -> dict[str, Any]:
        return settings_of(self)

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        return None


@dataclass(frozen=True)
class Decoder:
    """How the GPU decodes. ``hw_decoder_load``: the share of the work for the GPU's JPEG engine. ``regions``: only the
    random crop is decoded, or (False) the whole picture, of which the GPU cuts it. ``hints``, ``padding``: NVIDIA's."""

    regions: bool = field(default_factory=nvjpeg.decodes_regions)
    hw_decoder_load: float = field(default_factory=nvjpeg.engine_load)
    hints: bool = False
    padding: bool = False

    def options(self, *, on_gpu: bool) -> dict[str, Any]:
        """What its operator is told; on a CPU there is nothing to choose."""
        if not on_gpu:
            return {}
        recipe = {**(HINTS if self.hints else {}), **(PADDING if self.padding else {})}
        return {"hw_decoder_load": self.hw_decoder_load, **recipe}


@dataclass(frozen=True)
class DaliGraph(Dali):
    """``nvidia.dali.Pipeline``; ``prefetch``: its queue's depth. Without a GPU the same graph on the CPU."""

    prefetch: int = 2
    exec_dynamic: bool = True

    def make(self, job: Job, device: str) -> Iterable[Any]:
        return self._batches(job, device)

    def _batches(self, job: Job, device: str) -> Iterator[dict[str, Any]]:
        plugin = importlib.import_module("nvidia.dali.plugin.pytorch")
        # without a size it goes on for ever; it copies what DALI will write over, and only that
        names = ["image", INDEX]
        batches = plugin.DALIGenericIterator([self._graph(job, device)], names, prepare_first_batch=False)
        labels = torch.tensor(job.source.dataset.labels, device=device)
        for _ in range(len(job.source) // job.batch_size):
            (batch,) = next(batches)
            index = batch[INDEX].reshape(-1).long()
            yield {"image": batch["image"], "label": labels[index], INDEX: index}

    def _graph(self, job: Job, device: str) -> Any:
        dali = importlib.import_module("nvidia.dali")
        importlib.import_module("nvidia.dali.fn")
        on_gpu, told = device == "cuda", told_by(job.pipeline)
        files = job.source.dataset.paths
        graph = dali.Pipeline(
            batch_size=job.batch_size,
            num_threads=self.threads,
            device_id=0 if on_gpu else None,
            seed=job.dataset.seed % 2**31,
            prefetch_queue_depth=self.prefetch,
            exec_dynamic=self.exec_dynamic,
        )
        with graph:
            encoded, index = dali.fn.readers.file(files=files, labels=list(range(len(files))), name="reader")
            image = self._square(dali, encoded, told, on_gpu=on_gpu)
            mirror = dali.fn.random.coin_flip(probability=told["probability"])
            graph.set_outputs(normalised(dali, image, mirror, told), index.gpu() if on_gpu else index)
        graph.build()
        return graph

    def _square(self, dali: ModuleType, encoded: Any, told: Mapping[str, Any], *, on_gpu: bool) -> Any:
        """A random crop of the picture, resized; on the GPU if there is one."""
        raise NotImplementedError


@dataclass(frozen=True)
class DaliGpu(Decoder, DaliGraph):
    """Decodes on the GPU ("mixed": with the host's help)."""

    def _square(self, dali: ModuleType, encoded: Any, told: Mapping[str, Any], *, on_gpu: bool) -> Any:
        decoder = {"device": "mixed" if on_gpu else "cpu", "output_type": dali.types.RGB}
        decoder |= self.options(on_gpu=on_gpu)
        if self.regions:
            image = dali.fn.decoders.image_random_crop(encoded, **decoder, **crop(told))
            return resized(dali, image, list(told["size"]))
        return dali.fn.random_resized_crop(
            dali.fn.decoders.image(encoded, **decoder),
            size=list(told["size"]),
            interp_type=dali.types.INTERP_LINEAR,
            antialias=False,
            **crop(told),
        )


@dataclass(frozen=True)
class DaliCpu(DaliGraph):
    """Decodes only the random crop, on the CPU. ``squares``: resizes there too, as NVIDIA's example does, so that less
    travels to the GPU."""

    squares: bool = False

    def _square(self, dali: ModuleType, encoded: Any, told: Mapping[str, Any], *, on_gpu: bool) -> Any:
        size = list(told["size"])
        image = dali.fn.decoders.image_random_crop(encoded, device="cpu", output_type=dali.types.RGB, **crop(told))
        if self.squares:
            image = resized(dali, image, size)
        image = image.gpu() if on_gpu else image
        return image if self.squares else resized(dali, image, size)


def crop(told: Mapping[str, Any]) -> dict[str, Any]:
    """How DALI draws the pipeline's crops."""
    return {"random_area": list(told["scale"]), "random_aspect_ratio": list(told["ratio"])}


# --- dynamic mode: operators called one by one, without a graph (experimental in DALI 2.4) ----------------------------


@dataclass(frozen=True)
class DaliDynamic(Decoder, Dali):
    """``nvidia.dali.experimental.dynamic``, which decodes as ``DaliGpu`` does.

    ``capture``: the first batch's calls become a pipeline, which prefetches the later ones (DALI's capture mode).
    ``ahead``: how many batches are begun before the one that is handed over; without capturing, nothing else
    prefetches.
    """

    capture: bool = True
    ahead: int = 0

    def make(self, job: Job, device: str) -> Iterable[Any]:
        return self._batches(job, device)

    def _batches(self, job: Job, device: str) -> Iterator[dict[str, Any]]:
        ndd = importlib.import_module("nvidia.dali.experimental.dynamic")
        on_gpu, files = device == "cuda", job.source.dataset.paths
        context = ndd.EvalContext(num_threads=self.threads, device_id=0 if on_gpu else None)
        random = ndd.random.RNG(job.dataset.seed % 2**31)
        # Capturing leaves out, without a word, calls with arguments of which it does not know that they stay the same.
        told = ndd.capture.invariant(_told(job, on_gpu=on_gpu))
        decoder = {name: ndd.capture.invariant(value) for name, value in self.options(on_gpu=on_gpu).items()}
        labels = torch.tensor(job.source.dataset.labels, device=device)
        reader = ndd.readers.File(files=files, labels=list(range(len(files))))
        begun: deque[tuple[Any, Any]] = deque()
        epoch = reader.next_epoch(batch_size=job.batch_size, ctx=context, capture=self.capture)
        for _, (encoded, index) in zip(range(len(job.source) // job.batch_size), epoch, strict=False):
            begun.append((self._image(ndd, encoded, told, decoder, random), index.gpu() if on_gpu else index))
            if len(begun) > self.ahead:
                yield _handed(*begun.popleft(), labels)
        for image, index in begun:
            yield _handed(image, index, labels)

    def _image(self, ndd: ModuleType, encoded: Any, told: Any, decoder: dict[str, Any], random: Any) -> Any:
        """A batch of pictures, decoded and finished: ``DaliGpu``'s graph, call by call."""
        if self.regions:
            image = ndd.decoders.image_random_crop(
                encoded,
                device=told.device,
                random_area=told.random_area,
                random_aspect_ratio=told.random_aspect_ratio,
                rng=random,
                **decoder,
            )
            image = ndd.resize(image, size=told.size, interp_type=told.linear, antialias=False)
        else:
            image = ndd.random_resized_crop(
                ndd.decoders.image(encoded, device=told.device, **decoder),
                size=told.size,
                random_area=told.random_area,
                random_aspect_ratio=told.random_aspect_ratio,
                interp_type=told.linear,
                antialias=False,
                rng=random,
            )
        mirror = ndd.random.coin_flip(probability=told.probability, batch_size=told.batch_size, rng=random)
        return ndd.crop_mirror_normalize(
            image, mirror=mirror, dtype=told.dtype, output_layout="CHW", mean=told.mean, std=told.std
        )


def _told(job: Job, *, on_gpu: bool) -> SimpleNamespace:
    """What the operators are told, the same for every batch."""
    told, types = told_by(job.pipeline), importlib.import_module("nvidia.dali.types")
    return SimpleNamespace(
        device="gpu" if on_gpu else "cpu",
        size=list(told["size"]),
        linear=types.INTERP_LINEAR,
        dtype=types.FLOAT,
        probability=told["probability"],
        batch_size=job.batch_size,
        mean=[255 * mean for mean in told["mean"]],
        std=[255 * std for std in told["std"]],
        **crop(told),
    )


def _handed(image: Any, index: Any, labels: torch.Tensor) -> dict[str, Any]:
    """A batch as tensors. DLPack has torch's current stream, which is the consumer's, wait for DALI's."""
    numbers = index.torch().reshape(-1).long()
    return {"image": image.torch(), "label": labels[numbers], INDEX: numbers}
