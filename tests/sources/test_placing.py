"""Where files are read to: decisions, and what the page cache has after it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page_cache import cached_pages, evict
from minato_gpu import DataLoader, Source, read_bytes
from minato_gpu.caching.next_use import NextUse
from minato_gpu.memory.arena import Arena
from minato_gpu.sources import placing
from minato_gpu.sources.blocks import IN_PAGE_CACHE, Blocks
from minato_gpu.sources.local import Ended, LocalReads
from minato_gpu.sources.memory_tier import NO_ITEM, Copy, MemoryTier
from minato_gpu.sources.placing import LOOKED, Placing, Where

FILES = 24
NBYTES = 9000


def why_off(files: int, cached: int | None, nbytes: int = 1000) -> str:
    """Why memory keeps no files after so many of these have been looked at."""
    memory = MemoryTier(3 * 4096, 100)
    decide = Placing(memory, lambda item: (item, 1), copies=False)
    for _ in range(files):
        assert decide.is_open
        decide.had(nbytes, cached)
    assert decide.is_open == (0 < files < LOOKED and cached is not None)
    decide.where(0)
    return memory.off_for_files


def test_the_page_cache_suffices_where_it_has_nearly_all_of_enough_files() -> None:
    assert "had 95% of the first 256" in why_off(LOOKED, 950)
    assert why_off(LOOKED, 4096), "whole pages are told"
    assert not why_off(LOOKED, 949)
    assert not why_off(LOOKED - 1, 1000), "these are too few to know"
    assert not why_off(1, None)
    assert not why_off(LOOKED, 0, nbytes=0)


@pytest.mark.parametrize("copies", [False, True])
def test_where_a_file_is_read_to(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    memory = MemoryTier(3 * 4096, 100)
    expected = ((0, 4000), (NO_ITEM, 4000), (0, 20_000)).__getitem__
    monkeypatch.setattr(placing, "say_once", said.append)
    decide = Placing(memory, expected, copies=copies)
    passes = Where.BLOCK if copies else Where.PAGE_CACHE
    assert Placing(None, expected, copies=copies).where(0) is passes
    memory.items(0, 1)
    assert decide.where(0) is Where.UNCACHED
    assert decide.where(1) is passes
    assert decide.where(2) is passes, "there is no room for it"
    for _ in range(LOOKED):
        decide.had(1, 1)
    assert [decide.where(0) for _ in range(2)] == [passes] * 2
    assert len(said) == 1 and str(memory.counts()["why"]) == memory.off_for_files
    assert memory.off_for_files in said[0]


def test_a_policy_that_may_exchange_is_always_asked() -> None:
    memory = MemoryTier(4096, 100)
    memory._policy = NextUse(4096, 100)
    memory.offer(0, Copy(("a", 0, None), 0, 4000, 1, 0.1), 0)
    assert memory.may_keep(1, 4000)


@pytest.mark.parametrize("where", Where)
def test_what_the_page_cache_has_after_a_read(tmp_path: Path, where: Where) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(NBYTES))
    assert pages([path], out=True) in (0, None)
    ended, cached, arena = asyncio.run(read(Source(str(path)), where))
    _, _, block, nbytes, error = ended
    assert (error, nbytes) == (None, NBYTES)
    if where is Where.PAGE_CACHE:
        assert block == IN_PAGE_CACHE
    else:
        assert bytes(Blocks(arena).view(block, nbytes)) == path.read_bytes()
    arena.close()
    if cached is not None:
        assert cached == (0 if where is Where.UNCACHED else -(-NBYTES // 4096))


class Always(Placing):
    """There."""

    def __init__(self, there: Where) -> None:
        super().__init__(None, lambda number: (NO_ITEM, 0), copies=False)
        self._passes = there


async def read(source: Source, where: Where) -> tuple[Ended, int | None, Arena]:
    """The read, what the page cache has of the file then, and the memory."""
    arena, told, placed = Arena("test", 1 << 20), asyncio.Queue[Ended](), Always(where)
    reads = LocalReads(Blocks(arena), told.put_nowait, placing=placed)
    reads.submit(0, source)
    ended = await told.get()
    reads.close()
    assert placed._files in (where is Where.UNCACHED, LOOKED)
    return ended, pages([Path(source.path)]), arena


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
    monkeypatch.setattr(placing, "LOOKED", 8)
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
