"""DALI as its users run it: DALI's own reader, decoder and random operators, all in DALI's threads on the CPU.

Nothing of ours stands between the files and the finished pictures, so that a comparison is with DALI at its best:

- The classifier's box is drawn and cut by the fused ``image_random_crop``, which decodes no more than it must.
- Mirroring is part of ``crop_mirror_normalize``, which reads every pixel anyway.
- The reader goes round without padding. Its batches are all full, and where an epoch's last batch is short the rest of
  it begins the next epoch, here as in the reader; padding would have DALI decode the last picture again and again.
- Pictures of one size leave DALI without a copy (as in DALI's own PyTorch iterator) where its batch is the job's.

Boxes and polygons do not go through DALI: the pipeline's own functions place them, once it is known what was mirrored.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from benchmarks.compare.workloads import INDEX
from benchmarks.peers.base import Job, Loader
from minato_gpu import Pipeline

Columns = tuple[Any, ...]
"""What DALI prepared for a number of samples: tensors or lists, one entry for each sample. Indices come first."""


@dataclass(frozen=True)
class DaliReaders(Loader):
    """``nvidia.dali.Pipeline`` with ``fn.readers.file``; ``prefetch``: its queue depth.

    Epochs must be read to their end: DALI's readers cannot be sent back to the first file.
    """

    package = "nvidia.dali"
    own_draws = True

    prefetch: int = 2

    def can_run(self, job: Job) -> bool:
        """Whether the job is one of photographs. The others have no equivalent, stage by stage, with DALI's readers:
        none reads compressed NIfTI volumes, DALI's resampler of audio has another filter than the pipeline's, and the
        light and heavy steps of speech are Python. A graph that left these out would do other work."""
        return job.pipeline is not None and job.pipeline.name in _KINDS

    def settings(self, job: Job) -> dict[str, Any]:
        return {"num_threads": job.workers, "prefetch_queue_depth": self.prefetch, "exec_dynamic": True}

    def make(self, job: Job) -> Iterable[Any]:
        return _Epochs(job, self.settings(job))


class _Epochs:
    """One graph for all epochs. ``_left``: samples that DALI has delivered with earlier ones, not yet asked for."""

    def __init__(self, job: Job, settings: dict[str, Any]) -> None:
        self._job = job
        self._kind = _KINDS[job.pipeline.name]
        self._scheduled = 0
        self._left: Columns = ()
        self._graph: Any = self._build(settings)
        for _ in range(settings["prefetch_queue_depth"]):
            self._count_begun()
        self._graph.schedule_run()  # the first call fills the queue

    def __iter__(self) -> Iterator[Any]:
        for indices in self._job.batches:
            parts = list(self._take(len(indices)))
            found = [int(index) for part in parts for index in part[0]]
            if found != indices:
                raise RuntimeError(f"DALI delivered samples {found[:5]}, not {indices[:5]}: was an epoch left early?")
            yield self._kind.join(self._job, parts)

    def _take(self, count: int) -> Iterator[Columns]:
        """The next ``count`` samples, in as many parts as DALI delivers them."""
        while count:
            if not self._left:
                self._left = self._receive()
            size = len(self._left[0])
            yield tuple(column[:count] for column in self._left)
            self._left = tuple(column[count:] for column in self._left) if size > count else ()
            count -= min(size, count)

    def _receive(self) -> Columns:
        """A batch of DALI's. The next one is scheduled before this one is used, as DALI's own iterators do it."""
        outputs = self._graph.share_outputs()
        self._graph.release_outputs()
        self._count_begun()
        self._graph.schedule_run()
        indices, *rest = (_column(output) for output in outputs)
        return indices.reshape(-1), *rest

    def _count_begun(self) -> None:
        """Count a batch as begun when it is scheduled; what DALI's threads have really begun nobody can see."""
        begun, samples, size = self._job.source.begun, len(self._job.source), self._job.batch_size
        if begun is not None:
            first = self._scheduled * size
            np.add.at(begun.counts, np.arange(first, first + size) % samples, 1)
        self._scheduled += 1

    def _build(self, settings: dict[str, Any]) -> Any:
        dali = importlib.import_module("nvidia.dali")
        importlib.import_module("nvidia.dali.fn")
        pipeline, dataset = self._job.pipeline, self._job.source.dataset
        files = [dataset[index]["path"] for index in range(len(dataset))]
        graph = dali.Pipeline(
            batch_size=self._job.batch_size, device_id=None, seed=self._job.dataset.seed % 2**31, **settings
        )
        with graph:
            encoded, index = dali.fn.readers.file(files=files, labels=list(range(len(files))), random_shuffle=False)
            graph.set_outputs(index, *self._kind.draw(dali, encoded, told_by(pipeline)))
        graph.build()
        return graph


def _column(output: Any) -> Any:
    """A tensor where all samples are of one shape, else a list of tensors; of DALI's memory, not of a copy."""
    if output.is_dense_tensor():
        return from_dlpack(output.as_tensor())
    return [from_dlpack(each) for each in output]


def told_by(pipeline: Pipeline) -> dict[str, Any]:
    """All that the pipeline's functions are told by name, so that the graph is told the same."""
    told: dict[str, Any] = {}
    for stage in pipeline.stages:
        for function in (stage.cpu, stage.draw):
            if isinstance(function, partial):
                told |= function.keywords
    return told


def finished(dali: ModuleType, image: Any, size: Any, mirror: Any, told: Mapping[str, Any]) -> Any:
    """Resized without antialiasing, as the pipelines do it; mirrored; normalised; channel first."""
    resized = dali.fn.resize(image, size=size, interp_type=dali.types.INTERP_LINEAR, antialias=False)
    return normalised(dali, resized, mirror, told)


def normalised(dali: ModuleType, image: Any, mirror: Any, told: Mapping[str, Any]) -> Any:
    """Mirrored; normalised; channel first."""
    return dali.fn.crop_mirror_normalize(
        image,
        mirror=mirror,
        dtype=dali.types.FLOAT,
        output_layout="CHW",
        mean=[255 * mean for mean in told["mean"]],
        std=[255 * std for std in told["std"]],
    )


def _draw_crop(dali: ModuleType, encoded: Any, told: Mapping[str, Any]) -> Columns:
    image = dali.fn.decoders.image_random_crop(
        encoded,
        output_type=dali.types.RGB,
        random_area=list(told["scale"]),
        random_aspect_ratio=list(told["ratio"]),
    )
    mirror = dali.fn.random.coin_flip(probability=told["probability"])
    return (finished(dali, image, list(told["size"]), mirror, told),)


def _join_crops(job: Job, parts: Sequence[Columns]) -> Any:
    """What the job's own function makes of them, without its copy where there is one part."""
    indices, images = (columns[0] if len(parts) == 1 else torch.cat(columns) for columns in zip(*parts, strict=True))
    dataset = job.source.dataset
    labels = torch.tensor([dataset[index]["label"] for index in indices.tolist()])
    return {"image": images, "label": labels, INDEX: indices.to(torch.int64)}


def _draw_whole(dali: ModuleType, encoded: Any, told: Mapping[str, Any]) -> Columns:
    image = dali.fn.decoders.image(encoded, output_type=dali.types.RGB)
    size = image.shape()[:2]
    mirror = dali.fn.random.coin_flip(probability=told["probability"])
    target = dali.fn.cast(_target_size(dali, size, told["shorter"], told["longest"]), dtype=dali.types.FLOAT)
    return finished(dali, image, target, mirror, told), size, mirror


def _target_size(dali: ModuleType, size: Any, shorter: int, longest: int) -> Any:
    """As ``detection_stages.target_size``: of the two scales the smaller one decides. ``resize_shorter`` with
    ``max_size`` would round where the pipeline drops fractions, and pictures would differ by a pixel."""
    low, high = dali.math.min(size[0], size[1]), dali.math.max(size[0], size[1])
    return dali.math.max(dali.math.min(size * shorter // low, size * longest // high), 1)


def _join_whole(job: Job, parts: Sequence[Columns]) -> Any:
    """Each picture with its annotations, placed by those of the pipeline's stages that do not touch the picture."""
    pipeline: Pipeline = job.pipeline
    stages = [stage for stage in pipeline.stages[: pipeline.host_prefix] if "encoded" not in stage.writes]
    samples = []
    for index, image, size, mirror in (sample for part in parts for sample in zip(*part, strict=True)):
        fields = {**job.source.dataset[int(index)], INDEX: np.int64(index), "size": size.numpy()}
        for stage in stages:
            fields |= stage.cpu(fields, {"mirror": int(mirror)})
        fields["image"] = image.numpy()
        samples.append({name: fields[name] for name in pipeline.outputs})
    return job.join(samples)


@dataclass(frozen=True)
class _Kind:
    """A workload: what follows the reader in the graph, and how what it gives becomes a batch."""

    draw: Callable[[ModuleType, Any, Mapping[str, Any]], Columns]
    join: Callable[[Job, Sequence[Columns]], Any]


_KINDS = {
    "image_classification": _Kind(_draw_crop, _join_crops),
    "object_detection": _Kind(_draw_whole, _join_whole),
}
