"""Data sets of the cases.

A fault that is to strike once strikes once, whichever worker it strikes: its count is in memory that all share.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from minato_gpu import Source, read_bytes
from tests.contracts.cases import BAD, SAMPLES, STREAM_OF, STREAMS, Case
from tests.contracts.kinds import KINDS, Sample, file_of, file_sample, of_stream

BROKEN = f"sample {BAD} is broken"
_TIMES = {"none": 0, "retry": 1, "killed once": 1}
_SLOW = 200_000  # steps of work, some milliseconds: what other samples overtake
_FORK = multiprocessing.get_context("fork")


class Data:
    """Sample ``key`` is the one that its kind makes, but that of BAD, to which the case's fault happens."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.left = _FORK.Value("q", _TIMES.get(case.fault, 1 << 30), lock=False)
        self.die: Callable[[], object] | None = None  # how a worker dies, if not by SIGKILL

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: Any) -> Any:
        assert sum(range(_SLOW if int(key) % 7 == 3 else 100)) > 0
        if int(key) == BAD and self.left.value:
            self.left.value -= 1
            if self.case.fault.startswith("killed"):
                self.die() if self.die is not None else os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(BROKEN)
        return self.make(int(key))

    def make(self, key: int) -> Any:
        """The sample where nothing happens to it."""
        return KINDS[self.case.data].make(key)


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
        return file_sample(key, bytes(read_bytes(self.source(key)).data))


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
    return of_stream(worker * STREAM_OF + number)


def data_of(case: Case, folder: Path) -> Any:
    """The case's data set."""
    streams: dict[str, Any] = {
        "stream": Stream,
        "stateful stream": StatefulStream,
        "stateful iterator": StatefulIterator,
    }
    if case.streams:
        return streams[case.data]()
    if case.data == "files":
        return Files(case, folder)
    return ManyAtOnce(case) if case.data == "many at once" else Data(case)


def collate_of(case: Case) -> Any:
    """The case's ``collate_fn``: None for PyTorch's."""
    return None if KINDS[case.data].joins else _as_it_is


def _as_it_is(samples: Any) -> Any:
    return samples


def samples_of(case: Case, batch: Any) -> tuple[Sample, ...]:
    """The samples of a batch; without batches, of one sample."""
    kind = KINDS[case.data]
    if case.batch is None:
        batch = default_collate([batch]) if kind.joins else [batch]
    return tuple(kind.read(batch))
