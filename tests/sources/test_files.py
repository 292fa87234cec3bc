"""Reads of files by threads: each is told of by itself, and none holds up another."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from minato_gpu import Source
from minato_gpu.memory.arena import Arena
from minato_gpu.sources.blocks import IN_PAGE_CACHE, NOWHERE, Blocks
from minato_gpu.sources.files import Ended, FileReads
from tests.sources.loops import in_a_loop
from tests.support.leaks import open_links

COUNT, NBYTES = 20, 5000


@pytest.fixture
def sources(tmp_path: Path) -> list[Source]:
    found = []
    for number in range(COUNT):
        path = tmp_path / f"{number}"
        path.write_bytes(os.urandom(NBYTES + number))
        found.append(Source(str(path)))
    return found


@dataclass
class Reads:
    """FileReads that are closed in the end."""

    keeps: bool = False

    async def __aenter__(self) -> Reads:
        self.arena, self._ended = Arena("test", 1 << 20), asyncio.Queue[Ended]()
        self.pool = FileReads(Blocks(self.arena), self._ended.put_nowait, keeps=lambda number: self.keeps)
        return self

    async def __aexit__(self, error: object, *_: object) -> None:
        self.pool.close()
        if error is None:  # else threads may wait for pipes
            assert self._ended.empty()
            for thread in self.pool._threads:
                thread.join()
        self.arena.close()

    async def all(self, sources: Iterable[Source], less: int = 0) -> dict[int, Ended]:
        """What is told of them, by number; of so many nothing is."""
        count = 0
        for number, source in enumerate(sources):
            self.pool.submit(number, source)
            count += 1
        return await self.told(count - less)

    async def told(self, count: int) -> dict[int, Ended]:
        found = [await self._ended.get() for _ in range(count)]
        return {each[0]: each for each in found}


@in_a_loop
async def test_one_that_cannot_be_read_is_that_one_alone(sources: list[Source]) -> None:
    """One is not there, one is a folder, and of one a part is wanted that reaches beyond its end."""
    path = sources[3].path
    Path(path).unlink()
    sources[5] = Source(str(Path(path).parent))
    sources[7] = Source(sources[7].path, 4000, 2000)
    sources[9] = Source(sources[9].path, 4000, 1000)
    async with Reads() as reads:
        found = await reads.all(sources)
    failed = {number: type(each[4]) for number, each in found.items() if each[4] is not None}
    assert failed == {3: FileNotFoundError, 5: IsADirectoryError, 7: EOFError}
    assert all(found[number][2] == NOWHERE for number in failed) and found[9][2:4] == (IN_PAGE_CACHE, 1000)


@in_a_loop
async def test_those_that_do_not_come_hold_up_no_other(sources: list[Source]) -> None:
    """Named pipes into which nobody writes yet, before the files and among them."""
    pipes = [number for number in range(COUNT) if number < 8 or number % 2]
    for number in pipes:
        path = Path(sources[number].path)
        path.unlink()
        os.mkfifo(path)
    async with Reads() as reads:
        reads.pool.submit(8, sources[8])
        await reads.told(1)  # a small file: from now on one thread reads several together
        found = await reads.all(sources, less=len(pipes))
        assert not set(found) & set(pipes)
        for number in pipes:
            await asyncio.to_thread(lambda path: path.open("wb").close(), Path(sources[number].path))
        found = await reads.told(len(pipes))
        assert sorted(found) == pipes


@pytest.mark.parametrize("keeps", [False, True])
@in_a_loop
async def test_files_that_do_not_tell_their_size(tmp_path: Path, keeps: bool) -> None:
    """Those of /proc, devices and pipes, each opened once, come in blocks, wherever files are to go."""
    version = Path("/proc/version").read_bytes()
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    written = os.urandom(100_000)  # more than a pipe holds
    wanted = [
        (Source("/proc/version"), version),
        (Source("/proc/version", 6), version[6:]),
        (Source("/proc/version", 6, 7), version[6:13]),
        (Source("/dev/zero", 5, 10), bytes(10)),
        (Source(str(tmp_path / "empty")), b""),
        (Source(str(tmp_path / "pipe")), written),
        (Source(str(tmp_path / "pipe"), 0, len(written)), written),
    ]
    async with Reads(keeps) as reads:
        blocks = Blocks(reads.arena)
        for source, content in wanted:
            reads.pool.submit(0, source)
            if source.path.endswith("pipe"):
                await asyncio.to_thread((tmp_path / "pipe").write_bytes, content)
            _, _, block, nbytes, error = (await reads.told(1))[0]
            assert error is None and block != IN_PAGE_CACHE, source
            assert bytes(blocks.view(block, nbytes)) == content, source
        reads.pool.submit(0, Source(str(tmp_path / "empty"), 0, 7))
        assert str((await reads.told(1))[0][4]).endswith("ends 7 bytes too early")


@in_a_loop
async def test_a_shard_that_is_replaced_is_opened_anew(tmp_path: Path) -> None:
    async with Reads(keeps=True) as reads:
        for content in (b"before", b"behind"):
            (tmp_path / "new").write_bytes(content)
            (tmp_path / "new").rename(tmp_path / "shard")
            reads.pool.submit(0, Source(str(tmp_path / "shard"), 0, 6))
            _, _, block, nbytes, error = (await reads.told(1))[0]
            assert error is None and bytes(Blocks(reads.arena).view(block, nbytes)) == content
        assert not [link for link in open_links() if str(tmp_path) in link and "(deleted)" in link]
