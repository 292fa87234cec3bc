"""A tier on disk before the reader pool: what has a copy is read from that, all else by a pool that a test finishes."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minato_gpu.memory.arena import Arena
from minato_gpu.sources import disk_pool
from minato_gpu.sources.blocks import Blocks
from minato_gpu.sources.disk import LEAST_BUDGET
from minato_gpu.sources.disk.tier import DiskTier
from minato_gpu.sources.disk_pool import DiskPool, tier_key, version_of
from minato_gpu.sources.disk_retention import DiskRetention
from minato_gpu.sources.memory_tier import Begun
from minato_gpu.sources.source import Source
from tests.sources.loops import in_a_loop


class Bench:
    """A DiskPool, and what reaches the pool behind it (``asked``) and the service (``told``)."""

    def __init__(self, folder: Path) -> None:
        self.arena, self.tier = Arena("test"), DiskTier(folder / "cache", LEAST_BUDGET)
        self.blocks = Blocks(self.arena)
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.cancelled: list[int] = []
        self.done: Callable[..., None] = self._told
        behind: Any = self
        self.pool = DiskPool(self.tier, self.blocks, behind, DiskRetention(100))

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(self, error: object, *_: object) -> None:
        assert error or (self.told.empty() and self.asked.empty())
        self.pool.finish()
        self.tier.close()
        self.arena.close()

    def submit(self, number: int, source: Source) -> None:
        """As the pool behind it."""
        self.asked.put_nowait(number)

    def cancel(self, number: int) -> None:
        """As the pool behind it."""
        self.cancelled.append(number)

    def _told(self, number: int, block: int, nbytes: int, error: Any, **more: Any) -> None:
        data = b"" if block < 0 else bytes(self.blocks.view(block, nbytes))
        self.told.put_nowait({"number": number, "block": block, "data": data, "error": error, **more})

    async def read(self, number: int, data: bytes) -> dict[str, Any]:
        """The pool behind is asked for this, and reads it; what the service is told."""
        assert await self.asked.get() == number
        block, view = self.blocks.allocate(len(data))
        view[:] = data
        self.done(number, block, len(data), None)
        return await self.told.get()

    async def write(self, source: Source, found: dict[str, Any]) -> bool:
        """A copy of what was read is to be written; returns once that is done, if it is tried."""
        written = asyncio.Event()
        if not self.pool.write(source.key, found["version"], found["block"], len(found["data"]), written.set):
            return False
        await written.wait()
        return True


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


@pytest.mark.parametrize("data", [b"", b"of /proc"])
@in_a_loop
async def test_of_a_file_that_does_not_tell_its_size_no_copy_is_kept(tmp_path: Path, file: Path, data: bytes) -> None:
    """It says that it has no bytes, and may have others at the same time."""
    file.write_bytes(b"")
    async with Bench(tmp_path) as bench:
        bench.pool.submit(0, Source(str(file)))
        found = await bench.read(0, data)
        assert (found["version"] is None) == bool(data)


@in_a_loop
async def test_what_is_cancelled_while_it_is_looked_for_is_not_read(tmp_path: Path, file: Path) -> None:
    async with Bench(tmp_path) as bench:
        bench.pool.submit(0, Source(str(file)))
        bench.pool.cancel(0)
        assert isinstance((await bench.told.get())["error"], CancelledError) and bench.cancelled == []
        bench.pool.submit(0, Source(str(file)))
        assert (await bench.read(0, b"read"))["data"] == b"read", "the next is not taken for cancelled"


@in_a_loop
async def test_a_full_tier_is_asked_again_after_a_while(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or as an epoch begins: that it was full in the one before says nothing."""
    monkeypatch.setattr(disk_pool, "_FULL_FOR", 3)
    source = Source(str(file))
    async with Bench(tmp_path) as bench:
        bench.pool.submit(0, source)
        found = await bench.read(0, bytes(LEAST_BUDGET))
        assert [await bench.write(source, found) for _ in range(5)] == [True, False, False, False, True]
        bench.pool.begin(Begun(0, None, 1))
        assert await bench.write(source, found)
        assert bench.tier.stats()["refused"] == 3


@in_a_loop
async def test_a_copy_is_of_the_version_that_the_file_had_before_it_was_read(tmp_path: Path, file: Path) -> None:
    """Whatever became of it meanwhile: another version's bytes under the old one's name would be served for ever."""
    source = Source(str(file))
    before = version_of(source)
    async with Bench(tmp_path) as bench:
        bench.pool.submit(0, source)
        bench.asked.put_nowait(await bench.asked.get())
        file.write_bytes(b"changed meanwhile")
        found = await bench.read(0, b"changed meanwhile")
        assert found["version"] == before != version_of(source)
        assert await bench.write(source, found)
        into = bytearray(17)
        assert bench.tier.read(tier_key(source.key), before, lambda _: memoryview(into)) == len(into)
        assert into == b"changed meanwhile"
