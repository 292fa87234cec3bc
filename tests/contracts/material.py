"""Data sets and samplers of the cases, and how the samples of a batch are read: key, content, and what was drawn.

A fault that is to strike once strikes once, whichever worker it strikes: its count is in memory that all share.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, default_collate, get_worker_info

from minato_gpu import Field, Pipeline, Source, Stage, read_bytes
from minato_gpu.pipeline import TorchFunction
from tests.contracts.cases import BAD, LISTED, SAMPLES, STREAM_OF, STREAMS, Case

SEED = 11
BROKEN = f"sample {BAD} is broken"
_TIMES = {"none": 0, "retry": 1, "killed once": 1}
_FORK = multiprocessing.get_context("fork")
_X = Field(np.float32, (5,))


class Sample(NamedTuple):
    """One sample that came. ``content`` follows from the key; ``drawn``: numbers from random generators."""

    key: int
    content: Any
    drawn: tuple[float, ...]


@dataclass(frozen=True)
class Item:
    """A sample that is an object of a user's own class."""

    key: int
    name: str
    drawn: float


def _global_draws() -> list[float]:
    return [random.random(), float(np.random.random_sample()), float(torch.rand((), dtype=torch.float64))]


def _numbers(key: int) -> Any:
    return torch.tensor([key, key * key, *_global_draws()], dtype=torch.float64)


def _mapping(key: int) -> Any:
    return {"key": key, "name": f"n{key}", "rest": (np.full((2, 3), key, np.float32), _global_draws())}


def _ragged(key: int) -> Any:
    return key, torch.full((1 + key % 5,), key), _global_draws()


def _objects(key: int) -> Any:
    return Item(key, f"n{key}", float(torch.randn(())))


def _fields(key: int) -> Any:
    return {"n": key}


MAKE: dict[str, Callable[[int], Any]] = {
    "numbers": _numbers,
    "many at once": _numbers,
    "mapping": _mapping,
    "ragged": _ragged,
    "objects": _objects,
    "pipeline": _fields,
}


class Data:
    """Sample ``key`` is ``MAKE[case.data](key)``, but that of BAD, to which the case's fault happens."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.left = _FORK.Value("q", _TIMES.get(case.fault, 1 << 30), lock=False)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: Any) -> Any:
        if int(key) == BAD and self.left.value:
            self.left.value -= 1
            if self.case.fault.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(BROKEN)
        return self.make(int(key))

    def make(self, key: int) -> Any:
        """The sample where nothing happens to it."""
        return MAKE[self.case.data](key)


class ManyAtOnce(Data):
    """Is asked for several samples."""

    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [self[key] for key in keys]


class Files(Data):
    """Samples whose bytes lie in files."""

    def __init__(self, case: Case, folder: Path) -> None:
        super().__init__(case)
        self.folder = folder

    def source(self, key: Any) -> Source:
        return Source(str(self.folder / f"{int(key)}.bin"))

    def make(self, key: int) -> Any:
        data = bytes(read_bytes(self.source(key)).data)
        return {"key": key, "sum": zlib.crc32(data), "drawn": _global_draws()}


def file_of(key: int) -> bytes:
    """What the file of a sample holds."""
    return f"file {key} ".encode() * (100 + key)


def written(folder: Path) -> Path:
    """The folder with all files in it."""
    for key in range(SAMPLES):
        (folder / f"{key}.bin").write_bytes(file_of(key))
    return folder


class Stream(IterableDataset[Any]):
    """Worker ``w`` yields ``STREAMS[w]`` samples; it is read again after a resume."""

    def __iter__(self) -> Iterator[Any]:
        worker = _worker()
        return (_of_stream(worker, number) for number in range(STREAMS[worker]))


class StatefulStream(IterableDataset[Any]):
    """The data set has a state."""

    def __init__(self) -> None:
        self.loaded = self.at = 0

    def __iter__(self) -> Iterator[Any]:
        worker = _worker()
        self.at, self.loaded = self.loaded, 0
        while self.at < STREAMS[worker]:
            self.at += 1
            yield _of_stream(worker, self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["at"]


class StatefulIterator(Stream):
    """Its iterator has the state."""

    def __iter__(self) -> Any:
        return _StreamIterator()


class _StreamIterator:
    def __init__(self) -> None:
        self.worker, self.at = _worker(), 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == STREAMS[self.worker]:
            raise StopIteration
        self.at += 1
        return _of_stream(self.worker, self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


def _of_stream(worker: int, number: int) -> Any:
    key = worker * STREAM_OF + number
    return torch.tensor([key, key * key], dtype=torch.float64)


def data_of(case: Case, folder: Path) -> Any:
    """The case's data set."""
    streams = {"stream": Stream, "stateful stream": StatefulStream, "stateful iterator": StatefulIterator}
    if case.streams:
        return streams[case.data]()
    if case.data == "files":
        return Files(case, folder)
    return ManyAtOnce(case) if case.data == "many at once" else Data(case)


class Stateful:
    """A sampler with a state: each epoch has an order of its own, in which keys come again."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).choices(range(SAMPLES), k=SAMPLES)
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Listed:
    """A sampler of which nothing is known but what it yields."""

    def __iter__(self) -> Iterator[int]:
        yield from LISTED

    def __len__(self) -> int:
        return len(LISTED)


def batches() -> list[list[int]]:
    """Batches of a user's own."""
    order = list(LISTED)
    return [order[start : start + 1 + start % 4] for start in range(0, len(order) - 4, 3)]


def sampler_of(case: Case, rank: int) -> dict[str, Any]:
    """The arguments that say where the order comes from."""
    drawn = torch.Generator().manual_seed(SEED + 1)
    keys = range(SAMPLES)
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "none": dict,
        "sequential": dict,
        "shuffle=True": lambda: {"shuffle": True},
        "shuffled": lambda: {"sampler": RandomSampler(keys, generator=drawn)},
        "repeats": lambda: {"sampler": RandomSampler(keys, replacement=True, generator=drawn)},
        "stateful": lambda: {"sampler": Stateful()},
        "listed": lambda: {"sampler": Listed()},
        "batches": lambda: {"batch_sampler": batches()},
        "distributed": lambda: {"sampler": DistributedSampler(keys, case.ranks, rank, seed=SEED)},
    }
    return makers[case.sampler]()


def _read(fields: Any, params: Any) -> Any:
    return {"x": np.full(5, fields["n"], np.float32), "label": fields["n"]}


def _draw(rng: np.random.Generator, meta: Any) -> Any:
    return {"shift": rng.random(dtype=np.float32)}


def _shift(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] + params["shift"]}


def _shift_on_device(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] + torch.tensor(params["shift"])}


PIPELINE = Pipeline(
    (
        Stage("read", ("n",), {"x": _X, "label": Field(np.int64)}, cpu=_read),
        Stage("shift", ("x",), {"x": _X}, cpu=_shift, draw=_draw, device=TorchFunction(_shift_on_device)),
        Stage("again", ("x",), {"x": _X}, cpu=_shift, draw=_draw, device=TorchFunction(_shift_on_device)),
    ),
    outputs=("x", "label"),
)


def collate_of(case: Case) -> Any:
    """The case's ``collate_fn``: None for PyTorch's."""
    return _as_it_is if case.data in ("ragged", "objects") else None


def _as_it_is(samples: Any) -> Any:
    return samples


def samples_of(case: Case, batch: Any) -> tuple[Sample, ...]:
    """The samples of a batch; without batches, of one sample."""
    if case.data in ("ragged", "objects"):
        return tuple(map(_read_back, [batch] if case.batch is None else batch))
    if case.batch is None:
        batch = default_collate([batch])
    if case.streams or case.data in ("numbers", "many at once"):
        return tuple(Sample(int(row[0]), row[1], tuple(row[2:])) for row in batch.tolist())
    if case.data == "pipeline":
        assert all((x == x[0]).all() for x in batch["x"])
        return tuple(Sample(n, None, (x,)) for n, x in zip(batch["label"].tolist(), batch["x"][:, 0].tolist(), strict=True))
    if case.data == "files":
        columns = batch["key"].tolist(), batch["sum"].tolist(), zip(*(each.tolist() for each in batch["drawn"]), strict=True)
        return tuple(Sample(*row) for row in zip(*columns, strict=True))
    arrays, drawn = batch["rest"]
    rows = zip(batch["key"].tolist(), batch["name"], arrays.tolist(), zip(*map(torch.Tensor.tolist, drawn)), strict=True)
    return tuple(Sample(key, (name, str(array)), each) for key, name, array, each in rows)


def _read_back(sample: Any) -> Sample:
    if isinstance(sample, Item):
        return Sample(sample.key, sample.name, (sample.drawn,))
    key, tensor, drawn = sample
    return Sample(key, tuple(tensor.tolist()), tuple(drawn))


def content_of(case: Case, key: int) -> Any:
    """The content that the sample of a key must have."""
    if case.streams or case.data in ("numbers", "many at once"):
        return float(key * key)
    return {
        "mapping": (f"n{key}", str([[float(key)] * 3] * 2)),
        "ragged": (key,) * (1 + key % 5),
        "objects": f"n{key}",
        "pipeline": None,
        "files": zlib.crc32(file_of(key)),
    }[case.data]
