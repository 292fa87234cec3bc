"""Files that are brought into the page cache: workers read them from there, and nothing else where they have gone."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from benchmarks.page_cache import cached_pages, evict
from minato_gpu import Source, read_bytes
from minato_gpu.memory.arena import Arena
from minato_gpu.sources import page_cache
from minato_gpu.sources.blocks import IN_PAGE_CACHE
from minato_gpu.sources.page_cache import PageCache, bring_in, read
from minato_gpu.sources.reading import AT_HAND

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


def test_a_file_is_brought_in_and_read_from_there(path: Path) -> None:
    with path.open("rb") as file:
        if cached_pages(file.fileno()) is None:
            pytest.skip("this kernel does not tell what the page cache has")
        assert cached_pages(file.fileno()) == 0
        assert bring_in(file.fileno(), Source(str(path))) == len(CONTENT)
        assert cached_pages(file.fileno()) == -(-len(CONTENT) // 4096)
    found = read(Source(f"file://{path}"), len(CONTENT))
    assert found is not None and found.tobytes() == CONTENT and found.flags.writeable


def test_parts_of_files(path: Path) -> None:
    assert brought(Source(str(path), 10_000, 20_000)) == 20_000
    found = read(Source(str(path), 10_000, 20_000), 20_000)
    assert found is not None and found.tobytes() == CONTENT[10_000:30_000]
    assert brought(Source(str(path), 40_000)) == 10_000
    assert brought(Source(str(path), 60_000)) == 0
    with pytest.raises(EOFError, match="ends 10000 bytes too early"):
        brought(Source(str(path), 40_000, 20_000))


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


def test_what_is_of_no_use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open("rb") as file:
        assert bring_in(file.fileno(), Source(os.devnull)) is None, "no regular file"
    monkeypatch.setattr(page_cache, "_LOCAL", {})
    monkeypatch.setattr(page_cache, "remote_kind", lambda path: "NFS")
    assert brought(Source(str(path))) is None


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
