"""Files that are read into the page cache, where workers read them; and what it has after that."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from benchmarks.isolate import evict
from minato_gpu import Source, read_bytes
from minato_gpu.memory.arena import Arena
from minato_gpu.sources import page_cache
from minato_gpu.sources.blocks import IN_PAGE_CACHE
from minato_gpu.sources.page_cache import PageCache, bring_in
from minato_gpu.sources.reading import AT_HAND

CONTENT = os.urandom(50_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that the page cache does not have."""
    made = tmp_path / "file"
    made.write_bytes(CONTENT)
    with made.open("r+b") as file:
        os.fsync(file.fileno())
        evict(file.fileno())
    return made


def brought(source: Source, where: PageCache | None = None) -> int | None:
    with Path(source.path.removeprefix("file://")).open("rb") as file:
        return bring_in(file.fileno(), source) if where is None else where.bring_in(file.fileno(), source)


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
