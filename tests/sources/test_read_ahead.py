"""A loader whose data set declares its sources: everything comes as without, and workers wait for no storage."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader, Source, read_bytes
from minato_gpu.memory.arena import Arena
from minato_gpu.sources.process import ReaderSettings
from minato_gpu.sources.reader import Reader
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


def engine_of(loader: DataLoader[Any]) -> Any:
    return loader._session.engine


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


def test_the_reader_process_is_killed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Workers read for themselves: everything comes all the same, and it is said."""
    more: dict[str, Any] = {"persistent_workers": True}
    loader, other = loader_of(Files(root), **more), loader_of(Files(root, declares=False), **more)
    got = rows(loader)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        os.kill(engine_of(loader).pump.reads.reader.process.pid, signal.SIGKILL)
        got += rows(loader) + rows(loader)
    assert got == rows(other) + rows(other) + rows(other)
    assert "The process that reads ahead" in caplog.text and "exit code -9" in caplog.text
    found = reads(loader)
    assert found["process"] == "lost"
    assert found["by_workers"] > 0
    reader_fd = engine_of(loader).pump.reads.fd
    assert not select.select([reader_fd], [], [], 0.0)[0], "whoever waits for it would never sleep again"
    engine_of(loader).close()
    engine_of(other).close()


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


def test_a_reader_process_that_something_else_collects_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    def start(_main: Any, arena: Arena, end: socket.socket, *_: Any) -> Any:
        process = multiprocessing.get_context("fork").Process(target=end.recv, args=(1,))
        process.start()
        return process

    reader = Reader(start, ReaderSettings(), stays=True)
    process = reader.process
    os.kill(process.pid, signal.SIGKILL)
    os.waitpid(process.pid, 0)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        reader.say_lost()
    assert "has ended with an exit code that is not known" in caplog.text
    reader.close()
    assert process not in multiprocessing.active_children()


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
