"""A tier on disk before the reader pool: what has a copy is read from that, all else by a pool that a test finishes."""

from __future__ import annotations

import asyncio
import threading
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minato_gpu.memory.arena import Arena
from minato_gpu.sources import disk_pool
from minato_gpu.sources.blocks import Blocks
from minato_gpu.sources.disk.tier import Room
from minato_gpu.sources.disk_pool import DiskPool, tier_key, version_of
from minato_gpu.sources.disk_retention import DiskRetention
from minato_gpu.sources.memory_tier import Begun
from minato_gpu.sources.source import Source
from tests.sources.loops import in_a_loop


class FakeTier:
    """Copies in a dictionary. ``may_find`` and ``may_write`` hold its calls up while they are not set."""

    def __init__(self) -> None:
        self.copies: dict[bytes, tuple[bytes, bytes]] = {}
        self.told: list[str] = []
        self.has_room = True
        self.may_find, self.may_write = threading.Event(), threading.Event()
        self.may_find.set()
        self.may_write.set()

    def read(self, key: bytes, version: bytes, allocate: Callable[[int], memoryview]) -> int | None:
        self.may_find.wait()
        found, data = self.copies.get(key, (b"", b""))
        if found != version or not data:
            return None
        allocate(len(data))[:] = data
        return len(data)

    def write(self, key: bytes, version: bytes, data: memoryview) -> bool:
        self.may_write.wait()
        if self.has_room:
            self.copies[key] = version, bytes(data)
        return self.has_room

    def begin_epoch(self) -> None:
        self.told.append("begin")

    def is_alone(self) -> bool:
        return True

    def room(self) -> Room:
        return Room(40 * 4096, 100, 100 * 4096)

    def stats(self) -> dict[str, Any]:
        return {}


class Bench:
    """A DiskPool, and what reaches the pool behind it (``asked``) and the service (``told``)."""

    def __init__(self, tier: Any) -> None:
        self.arena = Arena("test")
        self.blocks = Blocks(self.arena)
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.cancelled: list[int] = []
        self.done: Callable[..., None] = self._told
        behind: Any = self
        self.pool = DiskPool(tier, self.blocks, behind, DiskRetention(100))

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(self, error: object, *_: object) -> None:
        assert error or (self.told.empty() and self.asked.empty())
        self.pool.finish()
        self.arena.close()

    def submit(self, number: int, source: Source) -> None:
        """As the pool behind it."""
        self.asked.put_nowait(number)

    def cancel(self, number: int) -> None:
        """As the pool behind it."""
        self.cancelled.append(number)

    def _told(self, number: int, block: int, nbytes: int, error: Any, **more: Any) -> None:
        data = b"" if block < 0 else bytes(self.blocks.view(block, nbytes))
        found = {"number": number, "block": block, "data": data, "error": error, **more}
        self.told.put_nowait(found)

    async def read(self, number: int, data: bytes) -> dict[str, Any]:
        """The pool behind is asked for this, and reads it; what the service is told."""
        assert await self.asked.get() == number
        block, view = self.blocks.allocate(len(data))
        view[:] = data
        self.done(number, block, len(data), None)
        return await self.told.get()

    async def write(self, source: Source, found: dict[str, Any]) -> bool:
        """A copy of what was read is to be written; returns once that is done, if it is."""
        written = asyncio.Event()
        if not self.begin_write(source, found, written.set):
            return False
        await written.wait()
        return True

    def begin_write(self, source: Source, found: dict[str, Any], written: Callable[[], None]) -> bool:
        key, nbytes = (source.path, source.offset, source.length), len(found["data"])
        return self.pool.write(key, found["version"], found["block"], nbytes, written)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


@pytest.fixture
def source(file: Path) -> Source:
    return Source(str(file))


@pytest.mark.parametrize("data", [b"", b"of /proc"])
@in_a_loop
async def test_of_a_file_that_does_not_tell_its_size_no_copy_is_kept(file: Path, source: Source, data: bytes) -> None:
    """It says that it has no bytes, and may have others at the same time."""
    file.write_bytes(b"")
    async with Bench(FakeTier()) as bench:
        bench.pool.submit(0, source)
        found = await bench.read(0, data)
        assert (found["version"] is None) == bool(data)


@in_a_loop
async def test_what_is_cancelled_while_it_is_looked_for_is_not_read(source: Source) -> None:
    tier = FakeTier()
    async with Bench(tier) as bench:
        tier.may_find.clear()
        bench.pool.submit(0, source)
        bench.pool.cancel(0)
        assert bench.cancelled == []
        tier.may_find.set()
        found = await bench.told.get()
        assert isinstance(found["error"], CancelledError)
        bench.pool.submit(1, source)
        assert (await bench.read(1, b"read"))["data"] == b"read", "the next is not taken for cancelled"


@pytest.mark.parametrize("epoch", [False, True])
@in_a_loop
async def test_a_full_tier_is_asked_again_after_a_while(
    source: Source, monkeypatch: pytest.MonkeyPatch, epoch: bool
) -> None:
    """Or as an epoch begins: that it was full in the one before says nothing, also where that is told late."""
    monkeypatch.setattr(disk_pool, "_FULL_FOR", 3)
    tier = FakeTier()
    tier.has_room = False
    async with Bench(tier) as bench:
        bench.pool.submit(0, source)
        found = await bench.read(0, b"content")
        assert [await bench.write(source, found) for _ in range(5)] == [True, False, False, False, True]
        if not epoch:
            assert [await bench.write(source, found) for _ in range(4)] == [False, False, False, True]
            return
        bench.pool.begin(Begun(0, None, 1))
        tier.may_write.clear()
        written: asyncio.Queue[int] = asyncio.Queue()
        assert bench.begin_write(source, found, lambda: written.put_nowait(0))
        bench.pool.begin(Begun(0, None, 1))
        tier.may_write.set()
        await written.get()
        assert await bench.write(source, found)
        assert tier.told == ["begin", "begin"]


@in_a_loop
async def test_a_copy_is_of_the_version_that_the_file_had_before_it_was_read(file: Path, source: Source) -> None:
    """Whatever became of it meanwhile: another version's bytes under the old one's name would be served for ever."""
    tier = FakeTier()
    async with Bench(tier) as bench:
        before = version_of(source)
        bench.pool.submit(0, source)
        bench.asked.put_nowait(await bench.asked.get())
        file.write_bytes(b"changed meanwhile")
        found = await bench.read(0, b"changed meanwhile")
        assert found["version"] == before != version_of(source)
        assert await bench.write(source, found)
        assert tier.copies == {tier_key(source.key): (before, b"changed meanwhile")}
