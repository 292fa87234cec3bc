"""DALI's dynamic mode: its operators called one by one, without a graph (experimental in DALI 2.4)."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from benchmarks.compare.dali_readers import told_by
from benchmarks.compare.workloads import INDEX
from benchmarks.peers import Job
from benchmarks.session.dali import Dali, Decoder, crop


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
