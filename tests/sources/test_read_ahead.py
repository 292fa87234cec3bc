"""A loader whose data set declares its sources: everything comes as without, and workers wait for no storage."""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader, Source, read_bytes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")

SAMPLES = 120
GONE = SAMPLES // 10  # files that the page cache may have let go of before they are used, on a machine short of memory


class Files:
    """Each sample is the sum of a file's bytes and a drawn number, after its key."""

    def __init__(self, root: Path, declares: bool = True) -> None:
        self.root = root
        if declares:
            self.source = self._source

    def _source(self, key: int) -> Source:
        return Source(str(self.root / f"{key}.bin"))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: int) -> tuple[int, int, float]:
        data = read_bytes(self.root / f"{key}.bin")
        return key, int(data.astype(np.int64).sum()), float(torch.rand(()))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for key in range(SAMPLES):
        np.random.default_rng(key).integers(0, 256, 1000 + 10 * key, np.uint8).tofile(folder / f"{key}.bin")
    return folder


def loader_of(dataset: Any, **more: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(dataset, 8, shuffle=True, **{"num_workers": 2, "generator": generator, **more})


def rows(batches: Any) -> list[tuple[Any, ...]]:
    return [row for batch in batches for row in zip(*(column.tolist() for column in batch), strict=True)]


def reads(loader: DataLoader[Any]) -> dict[str, Any]:
    found: dict[str, Any] = loader.stats()["reads"]
    return found


def test_a_sample_is_not_begun_before_its_bytes_are_there(root: Path) -> None:
    """A named pipe in the place of a file is read once somebody writes; all other samples of the window are done."""
    dataset = Files(root)
    late = root / "late"
    os.mkfifo(late)
    dataset.source = lambda key: Source(str(late), 0, 4) if key == 0 else Source(str(root / f"{key}.bin"))
    files: Any = dataset
    loader: DataLoader[Any] = DataLoader(files, 4, num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    assert wait_until(lambda: iterator._engine.log.lanes["cpu"].samples == 31), "all others of the window"
    assert iterator._engine.pump.run.scheduler.stall_cause() == "fetch"
    with late.open("wb") as pipe:
        pipe.write(b"1234")
    assert [row[0] for row in rows(iterator)] == list(range(SAMPLES))
    found = reads(loader)
    assert 1 <= found["by_workers"] <= 1 + GONE, "it read the file itself, which was not what had been declared"
    assert found["workers_idle_s"] > 0
    late.unlink()


def test_a_declaration_that_raises_is_said_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = Files(root)

    def source(key: int) -> Source:
        if key % 3 == 0:
            raise KeyError(key)
        return dataset._source(key)

    dataset.source = source
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        loader = loader_of(dataset)
        got = rows(loader)
    assert sorted(row[0] for row in got) == list(range(SAMPLES))
    assert caplog.text.count("is not read ahead") == 1
    assert 0 <= reads(loader)["by_workers"] - SAMPLES // 3 <= GONE


@pytest.mark.parametrize("when", ["in an epoch", "between epochs"])
def test_the_reader_ends_with_the_training_process(root: Path, when: str) -> None:
    """Also where that is killed: its socket closes."""
    child = os.fork()
    if child == 0:
        loader = loader_of(Files(root))
        if when == "between epochs":
            rows(loader)
            reader: Any = loader._session.readers._reader
        else:
            iterator: Any = iter(loader)
            next(iterator)
            reader = iterator._engine.pump.reads.reader
        (root / "pids").write_text(str(reader.process.pid))
        time.sleep(600)
    assert wait_until(lambda: (root / "pids").exists() and (root / "pids").read_text())
    ended = os.pidfd_open(int((root / "pids").read_text()))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert select.select([ended], [], [], 20.0)[0]
    os.close(ended)
    (root / "pids").unlink()


def test_what_a_sampler_raises_comes_where_it_came_without_reading_ahead(root: Path) -> None:
    """Although the sampler is drawn from long before."""

    class Ends:
        def __iter__(self) -> Any:
            yield from range(60)
            raise OSError("the index server is away")

        def __len__(self) -> int:
            return SAMPLES

    def got(dataset: Any) -> int:
        loader: DataLoader[Any] = DataLoader(dataset, 4, sampler=Ends(), num_workers=2)
        batches: list[Any] = []
        with pytest.raises(OSError, match="the index server is away"):
            batches.extend(iter(loader))
        return len(batches)

    assert got(Files(root)) == got(Files(root, declares=False))
