"""Data sets of the cases.

A fault that is to strike once strikes once, whichever worker it strikes: its count is in memory that all share.
"""

from __future__ import annotations

import functools
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from fsspec.asyn import AsyncFileSystem
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from minato_gpu import ShardedDataset, Source, read_bytes
from tests.contracts.cases import BAD, FILES, OF_FILES, SAMPLES, SHARDS, STARTS, STREAM_OF, STREAMS, Case
from tests.contracts.kinds import KINDS, Sample, drawn, file_of, file_sample
from tests.support.agents import is_at_agent
from tests.support.waiting import wait_until

BROKEN = f"sample {BAD} is broken"
NO_START = "no disk for this worker"
GONE = "gone.bin"
SHORT = "bytes too early"
NO_KEYS = "the index server is away"
_ALWAYS = 1 << 30
_TIMES = {"retry": 1, "killed once": 1, "hung once": 1}
_NEVER = ("none", "collate raises", *STARTS, "sampler raises")
_SLOW = 200_000  # steps of work, some milliseconds: what other samples overtake, where that may be longer


class Data:
    """Sample ``key`` is the one that its kind makes, but that of BAD, to which the case's fault happens."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.begun, self.struck = folder / "begun", folder / "struck"  # a byte for each sample asked for, each fault
        self.epochs = folder / "epochs"  # a byte for each that has begun
        self.strikes = True  # the fault happens
        self.die: Callable[[], object] | None = None  # how a worker dies, if not by SIGKILL

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: Any) -> Any:
        _count(self.begun)
        if self.case.far != "none":
            self._meet()
        if self.case.data == "pipeline":  # whose first stage calls it
            return {"n": int(key), "make": self.sample, "path": f"/of/{key}", "tries": np.zeros(1)}
        return self.sample(int(key))

    def _meet(self) -> None:
        """In each epoch workers here begin none before an agent's have begun one: else these would come too late."""
        met = self.folder / f"met {counted(self.epochs)}"
        if is_at_agent():
            met.touch()
        else:
            wait_until(met.exists, 20.0)  # or no agent is there

    def sample(self, key: int) -> Any:
        """The sample, or what happens instead."""
        assert sum(range(_SLOW * (5 if self.case.lateness else 1) if key % 7 == 3 else 100)) > 0
        if key != BAD or self.case.fault in _NEVER or self.case.error in OF_FILES or not self.strikes:
            return self.make(key)
        if counted(self.struck) >= max(1, counted(self.epochs)) * _TIMES.get(self.case.fault, _ALWAYS):
            return self.make(key)
        _count(self.struck)
        return happen(self.case) if self.die is None else self.die()

    def begin(self) -> None:
        """An epoch begins: what happens once happens once in each, if at all."""
        for _ in range(counted(self.struck), counted(self.epochs) * _TIMES.get(self.case.fault, 0)):
            _count(self.struck)
        _count(self.epochs)

    def make(self, key: int) -> Any:
        """The sample where nothing happens to it."""
        return KINDS[self.case.data].make(key)


def _count(file: Path) -> None:
    with file.open("ab", buffering=0) as opened:
        opened.write(b".")


def counted(file: Path) -> int:
    """How often something has happened, in whichever process."""
    return file.stat().st_size if file.exists() else 0


def happen(case: Case) -> Any:
    """What is wrong with a sample: it kills or stops its worker, raises, or is one that cannot be pickled."""

    class Local(Exception):
        """Cannot be pickled."""

    if case.fault.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if case.fault.startswith("hung"):
        _hangs_in_here()
    if case.error == "unsendable":
        return lambda: BAD
    raise {"StopIteration": StopIteration, "local": Local}.get(case.error, ValueError)(BROKEN)


def _hangs_in_here() -> None:
    while True:
        signal.pause()


class ManyAtOnce(Data):
    """Is asked for several samples."""

    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [self[key] for key in keys]


class Files(Data):
    """Samples whose bytes lie in files."""

    def source(self, key: Any) -> Source:
        """A file, that of odd keys relative to where the program is by now; of every third key a part of one of all."""
        number, version = int(key), self.version
        declared = str(version) if self.case.cache != "none" else ""  # what is kept in memory is not looked at again
        if number == BAD and self.case.error in OF_FILES:
            return (
                Source(self.path(GONE)) if self.case.error == "no file" else Source(self.path("all.bin"), 100, 1 << 20)
            )
        if number % 3:
            return Source(self.path(f"{number}.bin"), version=declared)
        begin = sum(len(file_of(before, version)) for before in range(number))
        return Source(self.path("all.bin"), begin, len(file_of(number, version)), version=declared)

    @property
    def version(self) -> int:
        """How often the files have changed."""
        return counted(self.folder / "changes")

    def path(self, name: str) -> str:
        """Where a file is."""
        path = self.folder / name
        return os.path.relpath(path) if len(name) % 2 else str(path)

    def make(self, key: int) -> Any:
        return file_sample(key, bytes(read_bytes(self.source(key)).data))

    def change(self) -> None:
        """Other files are in the places of these."""
        _count(self.folder / "changes")
        written(self.folder, self.version)


class Far(AsyncFileSystem):  # type: ignore[misc]
    """Answers from files of this machine; a host knows nothing of what another one has."""

    protocol = "far"
    cachable = False

    def __init__(self, host: str = "", **more: Any) -> None:
        super().__init__(**more)
        self.host = host

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"host": path.removeprefix("far://").partition("/")[0]}

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("far://")

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        host, rest = path.split("/", 1)
        if host != self.host:
            raise FileNotFoundError(f"{self.host} has no {path}")
        return Path("/", rest).read_bytes()[start:end]


fsspec.register_implementation("far", Far, clobber=True)


class Urls(Files):
    """The same at URLs of two hosts."""

    def source(self, key: Any) -> Source:
        found = super().source(key)
        url = f"far://host{int(key) % 2}{Path(found.path).absolute()}"
        return Source(url, found.offset, found.length, version=str(self.version))


def written(folder: Path, version: int = 0) -> Path:
    """The folder with all files in it, each alone and all in one; other ones than those that were there."""
    contents = {f"{key}.bin": file_of(key, version) for key in range(SAMPLES)}
    for name, data in {**contents, "all.bin": b"".join(contents.values())}.items():
        (folder / "new").write_bytes(data)
        (folder / "new").replace(folder / name)
    return folder


class Stream(IterableDataset[Any]):
    """Worker ``w`` yields ``STREAMS[w]`` samples; it is read again after a resume."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __iter__(self) -> Iterator[Any]:
        worker = _worker()
        return (self.sample(worker, number) for number in range(STREAMS[worker]))

    def sample(self, worker: int, number: int) -> Any:
        """One sample, or what happens instead."""
        key = worker * STREAM_OF + number
        return happen(self.case) if key == BAD and self.case.fault in ("raise", "killed") else KINDS["stream"].make(key)


class StatefulStream(Stream):
    """The data set has a state."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.loaded = self.at = 0

    def __iter__(self) -> Iterator[Any]:
        worker = _worker()
        self.at, self.loaded = self.loaded, 0
        while self.at < STREAMS[worker]:
            self.at += 1
            yield self.sample(worker, self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["at"]


class StatefulIterator(Stream):
    """Its iterator has the state."""

    def __iter__(self) -> Any:
        return _StreamIterator(self)


class _StreamIterator:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.worker, self.at = stream, _worker(), 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == STREAMS[self.worker]:
            raise StopIteration
        self.at += 1
        return self.stream.sample(self.worker, self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Sharded:
    """Shards, which ``ShardedDataset`` shares out among workers."""

    def __init__(self, case: Case) -> None:
        self.stream = Stream(case)

    def shards(self) -> list[str]:
        return [f"part-{part}" for part in range(len(SHARDS))]

    def iterate(self, shard: str) -> Iterator[Any]:
        part = int(shard.removeprefix("part-"))
        return (self.stream.sample(part, number) for number in range(SHARDS[part]))


class StatefulSplit(Stream):
    """Worker ``w`` of ``n`` begins with every n-th sample; its state is the list of those that are left."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.loaded: Any = None
        self.left: Any = None  # all

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        every = [(part, number) for part, size in enumerate(SHARDS) for number in range(size)]
        self.left = every[_worker() :: 1 if info is None else info.num_workers] if self.loaded is None else self.loaded
        self.loaded = None
        while self.left:
            yield self.sample(*self.left.pop(0))

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["left"]

    def split_states(self, states: list[Any], workers: int) -> list[Any]:
        if states[0]["left"] is None:
            return states[:1] * workers
        left = [sample for state in states for sample in state["left"]]
        return [{"left": left[worker::workers]} for worker in range(workers)]


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


def data_of(case: Case, folder: Path) -> Any:
    """The case's data set."""
    streams: dict[str, Any] = {
        "stream": Stream,
        "stateful stream": StatefulStream,
        "stateful iterator": StatefulIterator,
        "stateful shards": lambda case: ShardedDataset(Sharded(case)),
        "stateful split": StatefulSplit,
    }
    if case.streams:
        return streams[case.data](case)
    if case.data in FILES:
        return (Files if case.data == "files" else Urls)(case, folder)
    return (ManyAtOnce if case.data == "many at once" else Data)(case, folder)


def collate_of(case: Case) -> Any:
    """The case's ``collate_fn``: None for PyTorch's."""
    usual = None if KINDS[case.data].joins else _as_it_is
    if case.data == "closures":
        usual = _called
    if case.collate == "own":
        usual = _stacks
    elif case.collate == "draws":
        usual = functools.partial(_draws, usual or default_collate)
    return functools.partial(_refuses, case, usual or default_collate) if case.fault == "collate raises" else usual


def _as_it_is(samples: Any) -> Any:
    return samples


def _called(samples: Any) -> Any:
    """Makes a batch of what cannot be pickled."""
    return default_collate([sample() for sample in samples]) if isinstance(samples, list) else samples()


_kept: deque[tuple[Any, str]] = deque(maxlen=3)  # samples of earlier batches of this process, and what they were


def _stacks(samples: list[Any]) -> Any:
    """Keeps a sample, and looks at those that were kept."""
    for sample, was in tuple(_kept):
        assert str(sample) == was, f"a sample that was kept has become {sample}, was {was}"
    _kept.append((samples[0], str(samples[0])))
    return torch.stack(samples) if isinstance(samples[0], torch.Tensor) else default_collate(samples)


def _draws(collate: Any, samples: list[Any]) -> Any:
    return collate(samples), drawn()


def _refuses(case: Case, collate: Any, samples: list[Any]) -> Any:
    batch = collate(samples)
    if BAD in (sample.key for sample in samples_of(case, batch)[0]):
        raise ArithmeticError(BROKEN)
    return batch


def start_of(case: Case) -> Any:
    """The case's ``worker_init_fn``."""
    return {"start raises": _cannot, "start kills": _dies}.get(case.fault, _seeds if case.start == "seeds" else None)


def _dies(worker: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _cannot(worker: int) -> None:
    raise OSError(NO_START)


def _seeds(worker: int) -> None:
    """What it seeds is not what samples draw from."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def samples_of(case: Case, batch: Any) -> tuple[tuple[Sample, ...], tuple[float, ...]]:
    """The samples of a batch, without batches of one sample; and what its ``collate_fn`` has drawn."""
    kind, numbers = KINDS[case.data], ()
    if case.collate == "draws":
        batch, numbers = batch
    if case.batch is None:
        batch = default_collate([batch]) if kind.joins else [batch]
    return tuple(kind.read(batch)), tuple(numbers)
