"""Copies of sources that stay for later epochs, whatever becomes of processes, directories and disks. That everything
comes as without, and that what is kept is not read again, is in the table (``cases.py``)."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from minato_gpu.sources.memory_tier import MemoryTier
from tests.contracts.cached import DISK, PAGE, SAMPLES, Files, loader_of, of_tier, read, rows, sums, write_files
from tests.contracts.cached import without_draws as plain

_BOTH = {"memory": 20 * PAGE, "disk": DISK}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


def _whole(loader: Any) -> list[tuple[Any, ...]]:
    """An epoch, in order of its keys, without what was drawn."""
    return sorted(plain(rows(loader)))


def kept_bytes(loader: Any) -> int:
    """Memory of the reader process, in bytes."""
    return os.fstat(loader._session.readers._reader.arena.fd).st_blocks * 512


def test_files_that_have_changed_are_read_anew_by_the_tier_on_disk(tmp_path: Path) -> None:
    """In size, or a nanosecond later."""
    folder = write_files(tmp_path / "files")
    loader = loader_of(Files(folder), DISK, tmp_path / "cache")
    rows(loader)
    for key, longer, later in ((3, 1, 0), (50, 0, 1)):
        file = folder / f"{key}.bin"
        before = file.stat()
        file.write_bytes(bytes(before.st_size + longer))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + later))
    for reads in (2, 0):
        assert _whole(loader) == sums(folder)
        assert read(loader) == reads
    assert of_tier(loader, "disk")["stale"] == 0, "of the last epoch"


# --- what fails ------------------------------------------------------------------------------------------------------


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
        assert _whole(loader) == sums(folder)
        found.append(read(loader))
    memory = cache if isinstance(cache, int) else cache.get("memory", 0)
    assert found == [SAMPLES if isinstance(cache, int) else 0, 0]
    assert kept_bytes(loader) == min(memory // PAGE, SAMPLES) * PAGE if memory else True


@pytest.mark.parametrize("what", ["items", "offer"])
def test_an_error_in_the_books_ends_the_process_and_not_the_epoch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Else samples that were wanted in the same message would be waited for in vain."""

    def wrong(*_: Any) -> None:
        raise ArithmeticError("in the books")

    monkeypatch.setattr(MemoryTier, what, wrong)
    loader = loader_of(Files(folder), 10**6)
    assert _whole(loader) == sums(folder)
    assert loader.stats()["reads"]["process"] == "lost"
    assert "has ended with exit code 1" in caplog.text
    monkeypatch.undo()
    assert _whole(loader) == sums(folder)
    assert loader.stats()["reads"]["process"] == "runs"


@pytest.mark.parametrize("when", ["between epochs", "in an epoch"])
def test_the_directory_vanishes(folder: Path, tmp_path: Path, when: str) -> None:
    path = tmp_path / "cache"
    loader = loader_of(Files(folder), DISK, path)
    rows(loader)
    iterator = iter(loader) if when == "in an epoch" else None
    got = [] if iterator is None else [next(iterator)]
    while path.exists():  # a copy may be written there meanwhile
        shutil.rmtree(path, ignore_errors=True)
    got += list(loader if iterator is None else iterator)
    assert sorted(plain(rows(got))) == sums(folder)
    for reads in (0,) if iterator is None else (SAMPLES, 0):
        assert _whole(loader) == sums(folder)
        assert read(loader) == reads, "it has been made anew"


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
    loader: Any = loader_of(Files(folder), 10**6)
    rows(loader)
    told, tell = os.pipe()
    ask, asked = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(asked)
            parents = loader._session.readers._reader.process
            assert parents not in multiprocessing.active_children(), "as it ends it would wait for that"
            iterator = iter(loader)
            got = [next(iterator)]
            os.write(tell, b"begun")
            os.read(ask, 1)  # until the parent has closed its end, whatever has become of it
            got += list(iterator)
            os._exit(sorted(plain(rows(got))) != sums(folder) or of_tier(loader)["hits"] != 0)
        finally:
            os._exit(9)
    os.close(tell)
    try:
        assert os.read(told, 5) == b"begun"
        for _ in range(2):
            assert _whole(loader) == sums(folder)
            assert read(loader) == 0
    finally:
        os.close(asked)
        code = os.waitpid(child, 0)[1]
        for each in (told, ask):
            os.close(each)
    assert code == 0
