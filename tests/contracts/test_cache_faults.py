"""A cache whose process, directory, disk or books fail: everything comes all the same, and the next epoch works."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from minato_gpu.sources.disk.tier import DiskTier
from minato_gpu.sources.kept_memory import Table
from minato_gpu.sources.memory_tier import MemoryTier
from tests.contracts.cached import DISK, PAGE, SAMPLES, Files, close, loader_of, of_tier, read, rows, sums, write_files
from tests.contracts.cached import without_draws as plain
from tests.support.leaks import check_scenario
from tests.support.waiting import wait_until

_BOTH = {"memory": 20 * PAGE, "disk": DISK}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


def kept_bytes(loader: Any) -> int:
    """Memory behind what outlives reader processes, in bytes."""
    return os.fstat(loader._session.kept_memory().fd).st_blocks * 512


@pytest.mark.each_value
@pytest.mark.parametrize("cache", [100 * PAGE, {"disk": DISK}, _BOTH], ids=["memory", "disk", "both"])
@pytest.mark.parametrize("after", [0, 3])
def test_the_reader_process_is_killed(folder: Path, tmp_path: Path, cache: Any, after: int) -> None:
    """What it had in memory is lost, and read again in the next epoch; on disk it stays."""
    loader = loader_of(Files(folder), cache, tmp_path / "cache" if isinstance(cache, dict) else None, num_workers=2)
    rows(loader)
    iterator = iter(loader)
    got = [next(iterator) for _ in range(after)]
    os.kill(iterator._engine.pump.reads.reader.process.pid, signal.SIGKILL)
    got += list(iterator)
    assert sorted(plain(rows(got))) == sums(folder)
    found = []
    for _ in range(2):
        assert sorted(plain(rows(loader))) == sums(folder)
        found.append(read(loader))
    memory = cache if isinstance(cache, int) else cache.get("memory", 0)
    lost = SAMPLES if isinstance(cache, int) else 20 if memory else 0
    assert found == [lost, 0] or (after == 0 and found == [0, 0]), "it may have been killed before it took anything up"
    assert kept_bytes(loader) == min(memory // PAGE, SAMPLES) * PAGE if memory else True


def test_a_reader_process_that_is_killed_and_workers_that_persist(folder: Path) -> None:
    loader = loader_of(Files(folder), 10**6, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._engine.pump.reads.reader.process.pid, signal.SIGKILL)
    rows(iterator)
    for _ in range(2):
        assert sorted(plain(rows(loader))) == sums(folder)
    close(loader)
    assert sorted(plain(rows(loader))) == sums(folder)
    assert loader.stats()["reads"]["process"] == "runs", "started anew, with workers that are"
    close(loader)


@pytest.mark.parametrize("what", ["items", "offer"])
def test_an_error_in_the_books_ends_the_process_and_not_the_epoch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Else samples that were wanted in the same message would be waited for in vain."""

    def wrong(*_: Any) -> None:
        raise ArithmeticError("in the books")

    monkeypatch.setattr(MemoryTier, what, wrong)
    loader = loader_of(Files(folder), 10**6)
    assert sorted(plain(rows(loader))) == sums(folder)
    assert loader.stats()["reads"]["process"] == "lost"
    assert "has ended with exit code 1" in caplog.text
    monkeypatch.undo()
    assert sorted(plain(rows(loader))) == sums(folder)
    assert loader.stats()["reads"]["process"] == "runs"


@pytest.mark.parametrize("when", ["between epochs", "in an epoch"])
def test_the_directory_vanishes(folder: Path, tmp_path: Path, when: str) -> None:
    path = tmp_path / "cache"
    loader = loader_of(Files(folder), DISK, path)
    rows(loader)
    iterator = iter(loader) if when == "in an epoch" else None
    got = [] if iterator is None else [next(iterator)]
    shutil.rmtree(path)
    got += list(loader if iterator is None else iterator)
    assert sorted(plain(rows(got))) == sums(folder)
    for reads in (0,) if iterator is None else (SAMPLES, 0):
        assert sorted(plain(rows(loader))) == sums(folder)
        assert read(loader) == reads, "it has been made anew"


def test_a_directory_that_cannot_be_opened_any_more(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    loader = loader_of(Files(folder), _BOTH, path)
    rows(loader)
    shutil.rmtree(path)
    path.touch()
    for reads in (SAMPLES - 20, SAMPLES - 20):
        assert sorted(plain(rows(loader))) == sums(folder)
        assert read(loader) == reads
    assert "disk" not in loader.stats()["cache"]


@pytest.mark.parametrize(("error", "count"), [(errno.ENOSPC, "disk_full"), (errno.EROFS, "failed")])
def test_a_disk_that_takes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, count: str
) -> None:
    """It is full, or can only be read any more."""
    write, left = os.pwritev, [10]

    def full(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(error, os.strerror(error))
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", full)
    loader = loader_of(Files(folder), DISK, tmp_path / "cache")
    for written, reads in ((10, SAMPLES), (10, SAMPLES - 10), (10, SAMPLES - 20)):
        assert sorted(plain(rows(loader))) == sums(folder)
        assert read(loader) == reads
        assert of_tier(loader, "disk")["written"] == written
        assert of_tier(loader, "disk")[count] > 0


def test_a_disk_that_writes_everything_at_the_very_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When what is kept in memory has been left to the next process: what waits to be written is still there."""
    left, write, leave = threading.Event(), DiskTier.write, Table.leave

    def late(self: DiskTier, *arguments: Any) -> bool:
        left.wait()
        return write(self, *arguments)

    def leaves(self: Table, *what: Any) -> None:
        leave(self, *what)
        left.set()

    monkeypatch.setattr(DiskTier, "write", late)
    monkeypatch.setattr(Table, "leave", leaves)
    loader = loader_of(Files(folder), _BOTH, tmp_path / "cache")
    for reads in (SAMPLES, 0):
        assert sorted(plain(rows(loader))) == sums(folder)
        assert read(loader) == reads
    assert of_tier(loader)["hits"] == 20


def test_copies_on_disk_that_are_damaged(folder: Path, tmp_path: Path) -> None:
    loader = loader_of(Files(folder), DISK, tmp_path / "cache")
    rows(loader)
    (segment,) = (tmp_path / "cache" / "segments").iterdir()
    with segment.open("r+b") as file:
        for block in range(0, segment.stat().st_size, 3 * PAGE):
            file.seek(block + 7)
            file.write(b"wrong")
    for corrupt in (SAMPLES // 3, 0):
        assert sorted(plain(rows(loader))) == sums(folder)
        assert of_tier(loader, "disk")["corrupt"] == read(loader) == corrupt


def test_memory_of_the_budget_and_no_more(folder: Path) -> None:
    """Between epochs nothing else is held; within one, what is read ahead comes on top."""
    for pages in (1, 7, 50):
        loader = loader_of(Files(folder), pages * PAGE + PAGE - 1)
        for _ in range(3):
            for _ in loader:
                assert kept_bytes(loader) <= (pages + SAMPLES) * PAGE
            assert of_tier(loader)["bytes"] == pages * PAGE == kept_bytes(loader)
    loader = loader_of(Files(folder), PAGE - 1)
    rows(loader)
    assert of_tier(loader)["copies"] == 0 == kept_bytes(loader)


def test_a_forked_process_has_memory_of_its_own(folder: Path) -> None:
    """It would write where the parent's reader process has its copies, and take the table away from it."""
    loader = loader_of(Files(folder), 10**6)
    rows(loader)
    told, tell = os.pipe()
    ask, asked = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(asked)
            iterator = iter(loader)
            got = [next(iterator)]
            os.write(tell, b"begun")
            os.read(ask, 1)  # until the parent has closed its end, whatever has become of it
            got += list(iterator)
            os._exit(sorted(plain(rows(got))) != sums(folder) or of_tier(loader)["hits"] != 0)
        finally:
            os._exit(9)
    try:
        assert os.read(told, 5) == b"begun"
        for _ in range(2):
            assert sorted(plain(rows(loader))) == sums(folder)
            assert read(loader) == 0
    finally:
        os.close(asked)
        code = os.waitpid(child, 0)[1]
        for each in (told, tell, ask):
            os.close(each)
    assert code == 0


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_nothing_stays(folder: Path, tmp_path: Path, persistent: bool) -> None:
    def scenario() -> None:
        loader = loader_of(Files(folder), _BOTH, tmp_path / "cache", persistent_workers=persistent)
        rows(loader)
        for _ in loader:
            break
        iterator = iter(loader)
        next(iterator)

    check_scenario(scenario)


def test_the_directory_is_there_for_others_once_the_loader_is_gone(folder: Path, tmp_path: Path) -> None:
    loader = loader_of(Files(folder), DISK, tmp_path / "cache")
    rows(loader)
    assert wait_until(lambda: not loader._session.engine)
    tier = DiskTier(tmp_path / "cache", None)
    assert len(list(tier.entries())) == SAMPLES
    tier.close()
