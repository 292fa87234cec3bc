"""DALI as its users run it on a GPU: its own reader and random operators, mixed decoding, its own PyTorch iterator."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.compare.dali_readers import finished, told_by
from benchmarks.compare.workloads import INDEX
from benchmarks.peers import Job
from minato_gpu.stages import Tolerance


@dataclass(frozen=True)
class DaliGpu:
    """``nvidia.dali.Pipeline``. ``hw_decoder_load``: the share of pictures for the GPU's JPEG engine; ``prefetch``: the
    queue's depth. Without a GPU the same graph on the CPU."""

    name: str
    threads: int
    prefetch: int = 2
    hw_decoder_load: float = 0.65
    exec_dynamic: bool = True
    package: str = "nvidia.dali"
    ordered: bool = True
    own_draws: bool = True

    def settings(self) -> dict[str, Any]:
        names = ("threads", "prefetch", "hw_decoder_load", "exec_dynamic")
        return {name: getattr(self, name) for name in names}

    def make(self, job: Job, device: str) -> Iterable[Any]:
        return self._batches(job, device)

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        return None

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
        hardware = {"hw_decoder_load": self.hw_decoder_load} if on_gpu else {}
        with graph:
            encoded, index = dali.fn.readers.file(files=files, labels=list(range(len(files))), name="reader")
            image = dali.fn.decoders.image_random_crop(
                encoded,
                device="mixed" if on_gpu else "cpu",
                output_type=dali.types.RGB,
                random_area=list(told["scale"]),
                random_aspect_ratio=list(told["ratio"]),
                **hardware,
            )
            mirror = dali.fn.random.coin_flip(probability=told["probability"])
            image = finished(dali, image, [told["size"]] * 2, mirror, told)
            graph.set_outputs(image, index.gpu() if on_gpu else index)
        graph.build()
        return graph
