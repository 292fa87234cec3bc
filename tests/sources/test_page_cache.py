"""Where files are read to: into the page cache, where workers read them, or past it; and what it has after that."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.isolate import cached_pages, evict
from minato_gpu import DataLoader, Source, read_bytes
from minato_gpu.memory.arena import Arena
from minato_gpu.sources import page_cache
from minato_gpu.sources.blocks import IN_PAGE_CACHE
from minato_gpu.sources.disk.filesystem import Uncached
from minato_gpu.sources.memory_tier import MemoryTier
from minato_gpu.sources.page_cache import FIRST, FilePlacement, PageCache, bring_in, read
from minato_gpu.sources.reading import AT_HAND

FILES, NBYTES = 24, 9000
CONTENT = os.urandom(50_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(CONTENT)
    throw_out(file)
    return file


def throw_out(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        evict(file.fileno())


def brought(source: Source, where: PageCache | None = None) -> int | None:
    with Path(source.path.removeprefix("file://")).open("rb") as file:
        return bring_in(file.fileno(), source) if where is None else where.bring_in(file.fileno(), source)


def test_what_has_gone_or_changed_is_not_read(path: Path) -> None:
    source = Source(str(path))
    brought(source)
    throw_out(path)
    with path.open("rb") as file:
        if cached_pages(file.fileno()) == 0:
            found = read(source, len(CONTENT))  # what the kernel brings in meanwhile is the file's
            assert found is None or found.tobytes() == CONTENT
    brought(source)
    with path.open("ab") as file:
        file.write(b"more")
    assert read(source, len(CONTENT)) is None
    path.unlink()
    assert read(source, len(CONTENT)) is None


def test_where_nothing_stays_it_is_given_up(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One read in sixteen is looked at again, when 32 more of these have been made."""
    found: list[bytes | None] = [b""]
    monkeypatch.setattr(page_cache, "read", lambda source, nbytes: found[-1])
    where, source = PageCache(), Source(str(path))
    reads = 16 * (32 + 16)
    assert [brought(source, where) for _ in range(reads)] == [len(CONTENT)] * reads
    found.append(None)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        assert [brought(source, where) for _ in range(16 * 4)] == [len(CONTENT)] * 64, "a quarter may go"
        assert [brought(source, where) for _ in range(17)][-1] is None
    assert caplog.text.count("does not keep what is read ahead") == 1


def test_a_worker_reads_storage_where_it_has_gone(path: Path) -> None:
    source = Source(str(path))
    brought(source)
    AT_HAND.arena = arena = Arena("test", 1 << 20)
    try:
        AT_HAND.put([(IN_PAGE_CACHE, len(CONTENT), 0, *source.key)])
        with path.open("ab") as file:
            file.write(b"more")
        assert read_bytes(source).tobytes() == CONTENT + b"more"
        assert AT_HAND.direct == 1
        AT_HAND.put([(IN_PAGE_CACHE, len(CONTENT) + 4, 0, *source.key)])
        assert read_bytes(source).tobytes() == CONTENT + b"more"
        assert AT_HAND.direct == 1
    finally:
        AT_HAND.put(())
        AT_HAND.arena, AT_HAND.direct, AT_HAND.direct_s = None, 0, 0.0
        arena.close()


# --- where a file is read to -----------------------------------------------------------------------------------


def why_off(files: int, cached: int | None, nbytes: int = 1000) -> str:
    """Why memory keeps no files after so many of these have been looked at."""
    memory = MemoryTier(3 * 4096, 100)
    decide = FilePlacement(memory, lambda item: (item, 1), copies=False)
    for _ in range(files):
        assert decide.is_open
        decide.had(nbytes, cached)
    assert decide.is_open == (0 < files < FIRST and cached is not None)
    decide.where(0)
    return memory.off_for_files


def test_the_page_cache_suffices_where_it_has_nearly_all_of_enough_files() -> None:
    assert "had 95% of the first 256" in why_off(FIRST, 950)
    assert why_off(FIRST, 4096), "whole pages are told"
    assert not why_off(FIRST, 949)
    assert not why_off(FIRST - 1, 1000), "these are too few to know"
    assert not why_off(1, None)
    assert not why_off(FIRST, 0, nbytes=0)


def pages(paths: list[Path], *, out: bool = False) -> int | None:
    """How many the page cache has; None where that is not told. ``out``: after they have been thrown out."""
    total = 0
    for path in paths:
        with path.open("r+b") as file:
            if out:
                os.fsync(file.fileno())
                evict(file.fileno())
            found = cached_pages(file.fileno())
        if found is None:
            return None
        total += found
    return total


class Files:
    def __init__(self, root: Path) -> None:
        self.paths = [root / f"{number}" for number in range(FILES)]
        for number, path in enumerate(self.paths):
            path.write_bytes(bytes([number]) * NBYTES)

    def __len__(self) -> int:
        return FILES

    def source(self, key: int) -> Source:
        return Source(str(self.paths[key]))

    def __getitem__(self, key: int) -> int:
        return int(read_bytes(self.source(key))[-1])


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("warm", [False, True])
def test_no_byte_twice(tmp_path: Path, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory keeps the page cache has not; and where it has all of the first files, memory keeps no more."""
    monkeypatch.setattr(page_cache, "FIRST", 8)
    files: Any = Files(tmp_path)
    if pages(files.paths, out=not warm) is None:
        pytest.skip("this kernel does not tell what the page cache has")
    loader: Any = DataLoader(files, 4, num_workers=1, cache="4MB")
    for _ in range(2):
        assert [int(value) for batch in loader for value in batch] == list(range(FILES))
    found = loader.stats()["cache"]["memory"]
    if warm:
        assert found["why"].startswith("off for files: the page cache had") and found["copies"] < FILES
    else:
        assert (found["copies"], found["hits"]) == (FILES, FILES)
        assert pages(files.paths) == 0


# --- reading and writing past it -------------------------------------------------------------------------------


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file of 16 MB to be, on a disk whose page cache can be looked at."""
    made = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(made, bytes(4096), 0)
    os.fdatasync(made)
    evict(made)
    if cached_pages(made) != 0:
        pytest.skip("this kernel has no cachestat, or temporary files are in memory")
    yield made
    os.close(made)


@pytest.mark.parametrize("dontcache", [True, False], ids=["by the kernel", "by hand"])
def test_what_is_read_and_written_past_it_does_not_fill_it(fd: int, dontcache: bool) -> None:
    size, uncached, head = 1 << 20, Uncached(dontcache), b"head"
    data = memoryview(os.urandom(16 * size))
    uncached.write(fd, head, data)
    os.fdatasync(fd)  # what the kernel gives back by itself, it gives back once it has been written
    pages = 16 * size // os.sysconf("SC_PAGESIZE")
    assert (cached_pages(fd) or 0) < pages // 4
    evict(fd)
    into = memoryview(bytearray(size))
    for number in range(16):
        before = bytearray(4)
        found = uncached.read(fd, into, 4 + number * size, before)
        assert found == 4 + size and into == data[number * size :][:size]
        assert bytes(before) == (data[number * size - 4 : number * size].tobytes() if number else head)
    assert (cached_pages(fd) or 0) < pages // 16
    assert uncached.read(fd, into, 4 + 16 * size - 5000) == 5000 and uncached.read(fd, into, 4 + 16 * size) == 0
