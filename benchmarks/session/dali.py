"""DALI as its users run it on a GPU: its own reader, decoder and random operators.

``Dali`` is a graph behind DALI's own PyTorch iterator, ``DaliDynamic`` calls its operators one by one. Both draw by
themselves: their batches are the same work as the pipeline's, not the same pixels. Whole photographs are decoded, of
which the GPU cuts and resizes a random part. DALI's cache of decoded pictures is left out: nobody else has one here.
Decoding regions, NVIDIA's hints for nvJPEG's buffers and deeper queues are left out too: on an H200 the JPEG engine was
busy 91 % of the time without them (``results/nvidia-h200``).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from benchmarks.compare.dali import normalised, told_by
from benchmarks.compare.workloads import INDEX
from benchmarks.peers import Job
from benchmarks.session.loaders import Contender
from minato_gpu.device import nvjpeg


@dataclass(frozen=True)
class Dali(Contender):
    """``nvidia.dali.Pipeline``. ``threads`` of DALI's read, decode headers, and decode what the GPU does not;
    ``hw_decoder_load``: the share of the work for the GPU's JPEG engine. Without a GPU the same graph on the CPU."""

    package: ClassVar[str] = "nvidia.dali"
    own_draws: ClassVar[bool] = True

    threads: int
    hw_decoder_load: float = field(default_factory=nvjpeg.engine_load)

    def make(self, job: Job, device: str) -> Iterator[dict[str, Any]]:
        plugin = importlib.import_module("nvidia.dali.plugin.pytorch")
        # without a size it goes on for ever; it copies what DALI will write over, and only that
        names = ["image", INDEX]
        batches = plugin.DALIGenericIterator([self._graph(job, device)], names, prepare_first_batch=False)
        labels = torch.tensor(job.source.dataset.labels, device=device)
        for _ in range(len(job.source) // job.batch_size):
            (batch,) = next(batches)
            index = batch[INDEX].reshape(-1).long()
            yield {"image": batch["image"], "label": labels[index], INDEX: index}

    def _decoder(self, device: str) -> dict[str, Any]:
        return {"hw_decoder_load": self.hw_decoder_load} if device == "cuda" else {}

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
            exec_dynamic=True,
        )
        with graph:
            encoded, index = dali.fn.readers.file(files=files, labels=list(range(len(files))), name="reader")
            options = {"device": "mixed" if on_gpu else "cpu", "output_type": dali.types.RGB, **self._decoder(device)}
            image = dali.fn.random_resized_crop(
                dali.fn.decoders.image(encoded, **options),
                size=list(told["size"]),
                random_area=list(told["scale"]),
                random_aspect_ratio=list(told["ratio"]),
                interp_type=dali.types.INTERP_LINEAR,
                antialias=False,
            )
            mirror = dali.fn.random.coin_flip(probability=told["probability"])
            graph.set_outputs(normalised(dali, image, mirror, told), index.gpu() if on_gpu else index)
        graph.build()
        return graph


@dataclass(frozen=True)
class DaliDynamic(Dali):
    """``nvidia.dali.experimental.dynamic``: the first batch's calls become a pipeline, which prefetches the later ones
    (DALI's capture mode)."""

    def make(self, job: Job, device: str) -> Iterator[dict[str, Any]]:
        ndd, types = (importlib.import_module(f"nvidia.dali.{name}") for name in ("experimental.dynamic", "types"))
        on_gpu, files, told = device == "cuda", job.source.dataset.paths, told_by(job.pipeline)
        # Capturing leaves out, without a word, calls with arguments of which it does not know that they stay the same.
        fixed = ndd.capture.invariant
        context = ndd.EvalContext(num_threads=self.threads, device_id=0 if on_gpu else None)
        random = ndd.random.RNG(job.dataset.seed % 2**31)
        decoder = {"device": "gpu" if on_gpu else "cpu", **self._decoder(device)}
        crop = {"size": list(told["size"]), "random_area": list(told["scale"])}
        crop |= {"random_aspect_ratio": list(told["ratio"]), "interp_type": types.INTERP_LINEAR}
        flip = {"probability": told["probability"], "batch_size": job.batch_size}
        finish = {"dtype": types.FLOAT, "output_layout": "CHW"}
        finish |= {name: [255 * value for value in told[name]] for name in ("mean", "std")}
        decoder, crop, flip, finish = (
            {name: fixed(value) for name, value in options.items()} for options in (decoder, crop, flip, finish)
        )
        labels = torch.tensor(job.source.dataset.labels, device=device)
        reader = ndd.readers.File(files=files, labels=list(range(len(files))))
        epoch = reader.next_epoch(batch_size=job.batch_size, ctx=context, capture=True)
        for _, (encoded, index) in zip(range(len(job.source) // job.batch_size), epoch, strict=False):
            image = ndd.random_resized_crop(ndd.decoders.image(encoded, **decoder), antialias=False, rng=random, **crop)
            image = ndd.crop_mirror_normalize(image, mirror=ndd.random.coin_flip(rng=random, **flip), **finish)
            # DLPack has torch's current stream, which is the consumer's, wait for DALI's.
            numbers = (index.gpu() if on_gpu else index).torch().reshape(-1).long()
            yield {"image": image.torch(), "label": labels[numbers], INDEX: numbers}
