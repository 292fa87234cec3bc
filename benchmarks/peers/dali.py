"""DALI 2.4 beside its own pipelines (``compare.dali``): its dynamic mode, and its proxy behind PyTorch's loader.

Photographs of the classifier only, by DALI's CPU operators, with random values of DALI's own. Dynamic mode's best is
``capture=True``, which makes a pipeline of the calls and runs it ahead; without it, operators begin when they are
called, so that one batch is called ahead. The proxy's best is what its documentation names: not deterministic, a queue
of twice the workers, files read by the workers.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.compare.dali import finished, told_by
from benchmarks.compare.workloads import INDEX
from benchmarks.peers.base import Job, Loader


@dataclass(frozen=True)
class _OfPhotographs(Loader):
    own_draws = True

    def can_run(self, job: Job) -> bool:
        return job.pipeline is not None and job.pipeline.name == "image_classification"


@dataclass(frozen=True)
class DaliDynamic(_OfPhotographs):
    """``nvidia.dali.experimental.dynamic`` with its reader of files. ``extra_threads``: beside one for each worker."""

    package = "nvidia.dali.experimental.dynamic"

    capture: bool = True
    extra_threads: int = 0

    def settings(self, job: Job) -> dict[str, Any]:
        return {"num_threads": job.workers + self.extra_threads, "capture": self.capture}

    def make(self, job: Job) -> Iterable[Any]:
        return _Dynamic(self, job)


class _Dynamic:
    """Each ``iter`` is an epoch of one reader."""

    def __init__(self, loader: DaliDynamic, job: Job) -> None:
        self._dali, self._types = importlib.import_module(loader.package), importlib.import_module("nvidia.dali.types")
        self._dali.set_num_threads(job.workers + loader.extra_threads)
        items = [job.source.dataset[index] for index in range(len(job.source))]
        self._labels = torch.tensor([item["label"] for item in items])
        self._reader = self._dali.readers.File(files=[item["path"] for item in items], labels=list(range(len(items))))
        told = told_by(job.pipeline)
        as_floats = {name: [255 * float(value) for value in told[name]] for name in ("mean", "std")}
        told = {**told, **as_floats, "batch_size": job.batch_size, "linear": self._types.INTERP_LINEAR}
        # What a captured operator is given must be known not to change.
        keep = self._dali.capture.invariant if loader.capture else lambda value: value
        self._told = {name: keep(value) for name, value in told.items() if value is not None}
        self._capture = loader.capture

    def __iter__(self) -> Iterator[Any]:
        """The reader fills an epoch's last batch with samples of the next: they are cut off."""
        left = len(self._labels)
        for batch in self._batches():
            yield batch if len(batch[INDEX]) <= left else {name: value[:left] for name, value in batch.items()}
            left -= len(batch[INDEX])

    def _batches(self) -> Iterator[Any]:
        called: deque[tuple[Any, Any]] = deque()
        for encoded, index in self._reader.next_epoch(batch_size=int(self._told["batch_size"]), capture=self._capture):
            called.append((self._called(encoded), index))
            if self._capture or len(called) > 1:
                yield self._batch(*called.popleft())
        for image, index in called:
            yield self._batch(image, index)

    def _called(self, encoded: Any) -> Any:
        dali, told, types = self._dali, self._told, self._types
        box = dali.decoders.image_random_crop(encoded, random_area=told["scale"], random_aspect_ratio=told["ratio"])
        image = dali.resize(box, size=told["size"], interp_type=told["linear"], antialias=False)
        mirror = dali.random.coin_flip(probability=told["probability"], batch_size=encoded.batch_size)
        return dali.crop_mirror_normalize(
            image, mirror=mirror, mean=told["mean"], std=told["std"], dtype=types.FLOAT, output_layout="CHW"
        )

    def _batch(self, image: Any, index: Any) -> dict[str, Any]:
        indices = index.torch().reshape(-1).to(torch.int64)
        return {"image": image.torch(), "label": self._labels[indices], INDEX: indices}


@dataclass(frozen=True)
class DaliProxy(_OfPhotographs):
    """PyTorch's loader, whose workers read files, and a ``DALIServer`` that decodes in this process's threads.

    ``readers``: PyTorch's workers; DALI has a thread for each worker of the job.
    """

    package = "nvidia.dali.plugin.pytorch.experimental.proxy"

    prefetch: int = 2
    readers: int = 1

    def settings(self, job: Job) -> dict[str, Any]:
        chosen = {"num_threads": job.workers, "prefetch_queue_depth": 2 * self.readers}
        return chosen | {"num_workers": self.readers, "prefetch_factor": self.prefetch, "deterministic": False}

    def make(self, job: Job) -> Iterable[Any]:
        dali = importlib.import_module("nvidia.dali")
        proxy: Any = importlib.import_module(self.package)
        importlib.import_module("nvidia.dali.fn")
        told = told_by(job.pipeline)
        graph = dali.Pipeline(
            batch_size=job.batch_size, num_threads=job.workers, device_id=None, prefetch_queue_depth=2 * self.readers
        )
        with graph:
            encoded = dali.fn.external_source(name="encoded", no_copy=True)
            size, chance = list(told["size"]), told["probability"]
            image = dali.fn.decoders.image_random_crop(
                encoded,
                output_type=dali.types.RGB,
                random_area=list(told["scale"]),
                random_aspect_ratio=list(told["ratio"]),
            )
            graph.set_outputs(finished(dali, image, size, dali.fn.random.coin_flip(probability=chance), told))
        if not torch.backends.cuda.is_built():  # its marks for a profiler are functions of CUDA's
            proxy._nvtx = SimpleNamespace(range_push=_no_mark, range_pop=_no_mark)
        server = proxy.DALIServer(graph)
        server.start_thread()
        loader: Iterable[Any] = proxy.DataLoader(
            server,
            _Files(job.source.dataset, server.proxy),
            batch_size=job.batch_size,
            num_workers=self.readers,
            prefetch_factor=self.prefetch,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        return loader


def _no_mark(*_: Any) -> None:
    """Stands for a mark in a profiler's trace."""


class _Files:
    """Each file's bytes, which the proxy takes."""

    def __init__(self, dataset: Any, proxy: Any) -> None:
        self.dataset, self.proxy = dataset, proxy

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.dataset[index]
        image = self.proxy(np.fromfile(item["path"], np.uint8))
        return {"image": image, "label": item["label"], INDEX: index}
