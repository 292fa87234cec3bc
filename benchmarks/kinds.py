"""Six classes of work, each with its samples, batch size and collate function.

Photographs are the demonstration's (real ones, inside scikit-image), as they are or 128 pixels high; text is Python's
own documentation, cut into words that are hashed to tokens; arrays of 12 KiB cost a microsecond; the table is one of
Hugging Face's ``datasets``, by which most people have Arrow. Every sample carries its index.

Emulated, a sample sleeps for its cost (from half of the mean to one and a half) and is one of some that lie ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from benchmarks.compare.workloads import INDEX, Indexed, Prepared, first_epoch_seed, leaves, with_index
from benchmarks.peers import Job
from benchmarks.work import Trivial
from minato_gpu.lab.demo import photographs
from pipelines import image_classification

_FILES, _TEXTS, _READY = 300, 512, 64
_SIZES = {"light pictures": 64, "heavy pictures": 224}
_LIGHT_HEIGHT = 128
_TOKENS = 512
_VOCABULARY = 32_768


class Repeated:
    """The first ``len(dataset)`` samples over and over: epochs that take seconds."""

    def __init__(self, dataset: Any, samples: int) -> None:
        self.dataset, self.samples = dataset, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


class Texts:
    """Tokens of a text, as tokenisers give them: ``length`` of them, or (None) as many as the text has."""

    def __init__(self, samples: int, length: int | None) -> None:
        from pydoc_data.topics import topics

        words = " ".join(topics[name] for name in sorted(topics)).split()
        rng = np.random.default_rng(0)
        drawn = np.clip(rng.lognormal(4.5, 0.8, _TEXTS), 8, _TOKENS).astype(int)
        lengths = drawn.tolist() if length is None else [length] * _TEXTS
        starts = rng.integers(0, len(words) - _TOKENS, _TEXTS)
        self.texts = [" ".join(words[lo : lo + count]) for lo, count in zip(starts, lengths, strict=True)]
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.tensor([crc32(word.encode()) % _VOCABULARY for word in self.texts[index % _TEXTS].split()])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone(), INDEX: index}


class Emulated:
    """Sample ``index`` sleeps, and is one of ``_READY`` of the data set's."""

    def __init__(self, dataset: Any, samples: int, mean_s: float) -> None:
        self.ready = [dataset[index] for index in range(_READY)]
        self.costs_s = np.random.default_rng(11).uniform(0.5, 1.5, samples) * mean_s

    def __len__(self) -> int:
        return len(self.costs_s)

    def __getitem__(self, index: int) -> Any:
        time.sleep(float(self.costs_s[index]))
        sample = self.ready[index % _READY]
        if isinstance(sample, dict):
            return {**sample, INDEX: index}
        row = sample.copy()
        row[0] = index
        return row


def padded(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As long as the longest, filled with zeros."""
    names = [name for name in samples[0] if name != INDEX]
    batch = {name: pad_sequence([sample[name] for sample in samples], batch_first=True) for name in names}
    return {**batch, INDEX: torch.tensor([sample[INDEX] for sample in samples])}


def table(samples: int) -> Any:
    """64 numbers, a label, a price and a name's hash in each row."""
    import datasets

    rng = np.random.default_rng(0)
    columns = {
        "features": list(rng.random((samples, 64), dtype=np.float32)),
        "label": rng.integers(0, 10, samples),
        "price": rng.random(samples),
        INDEX: np.arange(samples),
    }
    return datasets.Dataset.from_dict(columns).with_format("torch")


def pictures(name: str, folder: Path, samples: int) -> Any:
    """The files, written where they are not there yet."""
    import cv2

    whole, small = folder / "photographs", folder / "small"
    if not whole.exists():
        photographs.make(whole, _FILES, 0)
    if name == "light pictures" and not small.exists():
        for path in sorted(whole.rglob("*.jpg")):
            picture = np.asarray(cv2.imread(str(path)))
            width = max(1, picture.shape[1] * _LIGHT_HEIGHT // picture.shape[0])
            target = small / path.relative_to(whole)
            target.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(target), cv2.resize(picture, (width, _LIGHT_HEIGHT), interpolation=cv2.INTER_AREA))
    return Repeated(image_classification.ImageFolder(whole if name == "heavy pictures" else small), samples)


@dataclass(frozen=True)
class Kind:
    """``samples``: of an epoch. ``sleep_ms``: the mean cost where it is emulated. ``made``: the data set of so many."""

    name: str
    samples: int
    batch_size: int
    sleep_ms: float = 10.0
    made: Callable[[int], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = default_collate

    @property
    def pictures(self) -> bool:
        return self.made is None

    def job(self, folder: Path, workers: int, *, emulated: bool, quick: bool) -> Job:
        """What loaders are asked: epoch after epoch, in the order of the indices."""
        samples = 8 * self.batch_size if quick else self.samples
        more: dict[str, Any] = {}
        if self.made is None:
            source = Indexed(pictures(self.name, folder, samples))
            pipeline = with_index(image_classification.build(size=_SIZES[self.name]))
            dataset: Any = Prepared(source, pipeline, first_epoch_seed())
            more = {"source": source, "pipeline": pipeline}
        else:
            dataset = self.made(samples)
        if emulated:
            fits = round(4e3 * workers / self.sleep_ms / self.batch_size) * self.batch_size  # four seconds of work
            dataset, more = Emulated(dataset, min(samples, fits), self.sleep_ms / 1e3), {}
        most = max(sum(leaf.nbytes for leaf in leaves(dataset[index])) for index in range(min(samples, _TEXTS)))
        return Job(dataset, self.batch_size, workers, most, keep_workers=True, collate=self.collate, **more)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("light pictures", 12_000, 64),
        Kind("heavy pictures", 1_500, 32, sleep_ms=30.0),
        Kind("fixed text", 40_000, 64, made=lambda samples: Texts(samples, _TOKENS)),
        Kind("variable text", 60_000, 64, made=lambda samples: Texts(samples, None), collate=padded),
        Kind("arrays", 131_072, 64, made=Trivial, collate=None),
        Kind("Arrow tables", 40_000, 64, made=table),
    )
}
