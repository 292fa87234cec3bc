"""What every loader is asked for: the photographs of a folder, over and over, and the check of what came.

One long epoch: no loader ends one while it is measured, so how they go from one to the next does not count here
(``benchmarks.compare`` measures that).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from benchmarks.compare.workloads import INDEX, Indexed, Prepared, deviations, first_epoch_seed, with_index
from benchmarks.peers import Job
from benchmarks.session.settings import Settings
from benchmarks.work import ContentError
from minato_gpu.pipeline.stages import Tolerance
from pipelines import image_classification

_CHECKED = 16  # samples whose content is compared
_LATE = 8 + 1  # batches: the loader's usual bound of lateness, and the batch under way


class Rounds:
    """``samples`` items of an ImageFolder: all photographs in turn, each round in another order."""

    def __init__(self, source: image_classification.ImageFolder, samples: int) -> None:
        rng, rounds = np.random.default_rng(0), -(-samples // len(source))
        self.order = np.concatenate([rng.permutation(len(source)) for _ in range(rounds)])[:samples]
        self.source = source

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[int(self.order[operator.index(index)])]

    @property
    def paths(self) -> list[str]:
        """The file of every item."""
        return [self.source.paths[number] for number in self.order]

    @property
    def labels(self) -> list[int]:
        """The label of every item."""
        return [self.source.labels[number] for number in self.order]


def job(settings: Settings, samples: int | None = None, *, fancy_upsampling: bool = True) -> Job:
    """Batches of the photographs; ``samples``: how many there are at most, a multiple of the batch if not given."""
    samples = settings.batch * (64 if settings.quick else 1000) if samples is None else samples
    source = Indexed(Rounds(image_classification.dataset(settings.folder), samples))
    pipeline = with_index(image_classification.build(settings.size, fancy_upsampling=fancy_upsampling))
    return Job(
        Prepared(source, pipeline, first_epoch_seed()),
        settings.batch,
        settings.workers,
        sample_bytes=settings.batch_bytes // settings.batch,
        keep_workers=True,
        collate=default_collate,
        source=source,
        pipeline=pipeline,
    )


class Content(NamedTuple):
    """How far pictures are from what one process prepares on the CPU, in levels: any value at most, and the mean of the
    worst sample. ``content_ok``: within what is declared; None where nothing can be compared."""

    max_levels: float | None = None
    mean_levels: float | None = None
    content_ok: bool | None = None


class Taken:
    """Which samples came. ``add`` costs the device a copy of a few bytes and the host no wait."""

    def __init__(self) -> None:
        self._indices: list[torch.Tensor] = []
        self._first: dict[str, torch.Tensor] = {}

    def add(self, batch: Mapping[str, Any]) -> None:
        """Note a batch's samples; of the first batch, the content of some."""
        if not self._first:
            self._first = {name: value[:_CHECKED].clone() for name, value in batch.items()}
        self._indices.append(batch[INDEX].clone())

    def check(self, asked: Job, tolerance: Tolerance | None, *, ordered: bool, own_draws: bool) -> Content:
        """How the first samples are. Raises ContentError where one came twice, is missing, or is another one.

        ``ordered``: in order or with the loader's bound of lateness, so that what is missing is known; of loaders that
        deliver on completion only what came twice is. ``own_draws``: the content is random in the loader's own way.
        """
        came = np.concatenate([indices.cpu().numpy().reshape(-1) for indices in self._indices])
        check_delivery(came, asked.batch_size, ordered=ordered)
        if own_draws:
            return Content()
        return content_of({name: value.cpu() for name, value in self._first.items()}, asked, tolerance)


def content_of(batch: Mapping[str, Any], asked: Job, tolerance: Tolerance | None) -> Content:
    """How far a batch is from what one process prepares for the same indices. A tolerance that nobody has measured on
    this device yet must not cost the figures: they come with how far off it was. Raises ContentError where anything
    but pictures differs."""
    tolerance = Tolerance() if tolerance is None else tolerance
    most = mean = 0.0
    for _, off in deviations(batch, asked):
        most, mean = max(most, float(off.max())), max(mean, float(off.reshape(len(off), -1).mean(1).max()))
    return Content(most, mean, most <= tolerance.maximum and mean <= tolerance.mean)


def check_delivery(came: Sequence[int] | Any, batch: int, *, ordered: bool) -> None:
    """Raises ContentError where a sample came twice, or (``ordered``) one is missing that should have come by now."""
    counts = np.bincount(came)
    twice = np.flatnonzero(counts > 1)
    if len(twice):
        raise ContentError(f"samples that came more than once: {twice[:5].tolist()} and so on")
    missing = np.flatnonzero(counts[: max(0, len(came) - _LATE * batch)] == 0)
    if ordered and len(missing):
        raise ContentError(f"samples that should have come: {missing[:5].tolist()} and so on")
