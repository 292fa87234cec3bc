"""What ``read_bytes`` gives: what lies ready, else what storage has; and how data sets declare where that is."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem
from fsspec.utils import infer_storage_options
from torch.utils.data import ConcatDataset, Dataset, Subset

from minato_gpu import DataLoader, Source, read_bytes
from minato_gpu.memory.arena import Arena
from minato_gpu.sources.blocks import Blocks, copy
from minato_gpu.sources.reading import AT_HAND, Place
from minato_gpu.sources.remote import RemoteReads
from minato_gpu.sources.source import source_of
from tests.sources.ranges import CONTENT, PARTS
from tests.support import programs


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena("test")
    yield made
    made.close()


@pytest.fixture
def at_hand(arena: Arena) -> Iterator[Any]:
    AT_HAND.arena = arena
    yield AT_HAND
    AT_HAND.put(())
    AT_HAND.arena, AT_HAND.direct, AT_HAND.direct_s = None, 0, 0.0


def lay_down(blocks: Blocks, source: Source, data: bytes) -> Place:
    block, view = blocks.allocate(len(data))
    view[:] = data
    return (block, len(data), blocks.publish(block), *source.key)


def test_what_lies_ready_is_copied_and_else_storage_is_read(tmp_path: Path, arena: Arena, at_hand: Any) -> None:
    (tmp_path / "file").write_bytes(b"from storage")
    source, blocks = Source(str(tmp_path / "file")), Blocks(arena)
    place = lay_down(blocks, source, b"read ahead")
    at_hand.put([place])
    first = read_bytes(tmp_path / "file")
    first[:] = 0
    assert read_bytes(source).tobytes() == b"read ahead"
    assert at_hand.direct == 0
    assert read_bytes(Source(source.path, 5)).tobytes() == b"storage", "another part is another source"
    blocks.free(place[0])
    assert read_bytes(source).tobytes() == b"from storage"
    assert at_hand.direct == 2
    assert at_hand.direct_s > 0


def test_a_block_that_is_given_to_something_else_meanwhile(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(arena)
    block, view = blocks.allocate(4)
    view[:] = b"data"
    stamp = blocks.publish(block)
    look = os.pread

    def look_and_free(fd: int, nbytes: int, offset: int) -> bytes:
        monkeypatch.setattr(os, "pread", look)
        found = look(fd, nbytes, offset)
        blocks.free(block)
        return found

    monkeypatch.setattr(os, "pread", look_and_free)
    assert copy(arena, block, 4, stamp) is None


def test_a_source_says_what_it_is() -> None:
    assert str(Source("a")) == "a"
    assert str(Source("a", 2, 3)) == "a[2:5]"
    assert str(Source("a", 2)) == "a[2:]"
    assert str(Source("a", 2, 3, "member")) == "a: member"
    assert Source("a", 2, 3, "member") == Source("a", 2, 3, "other")
    assert pickle.loads(pickle.dumps(Source("a", 2, 3, "member"))).name == "member"
    with pytest.raises(ValueError, match="must be >= 0, got -1 and None"):
        Source("a", -1)
    assert Source(Path("/a")) == Source("/a"), "a path object is a string then"  # type: ignore[arg-type]
    assert str(Source(Path("/a"))) == "/a"  # type: ignore[arg-type]
    for path in (7, b"a", Entry()):
        with pytest.raises(TypeError, match="a source's path must be a string or a path object, got"):
            Source(path)  # type: ignore[arg-type]


class Entry(os.PathLike[bytes]):
    def __fspath__(self) -> bytes:
        return b"a"


def test_keys_are_of_what_is_read_whatever_the_working_directory_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(name.encode())
    monkeypatch.chdir(tmp_path / "one")
    key = Source("a", 1, 2, version="tag").key
    assert key == (f"{tmp_path}/one/a", 1, 2, "tag") == Source("file://a", 1, 2, version="tag").key
    monkeypatch.chdir(tmp_path / "two")
    assert read_bytes(Source.of(key)).tobytes() == b"ne"
    assert Source.of(key).key == key != Source("a", 1, 2, version="tag").key
    assert Source("memory://a").key == ("memory://a", 0, None)


def test_devices_pipes_and_what_has_no_bytes(tmp_path: Path) -> None:
    assert read_bytes(Source("/dev/zero", 5, 10)).tobytes() == bytes(10)
    assert len(read_bytes("/dev/null")) == 0
    (tmp_path / "empty").touch()
    assert len(read_bytes(tmp_path / "empty")) == len(read_bytes(Source(f"{tmp_path}/empty", 3))) == 0
    for path, ends in (("/proc/version", 10**6 - len(Path("/proc/version").read_bytes())), (tmp_path / "empty", 10**6)):
        with pytest.raises(EOFError, match=f"ends {ends} bytes too early"):
            read_bytes(Source(str(path), 0, 10**6))
    os.mkfifo(tmp_path / "pipe")
    written = os.urandom(100_000)  # more than a pipe holds
    with ThreadPoolExecutor() as threads:
        for length, content in ((None, written), (None, b""), (len(written), written)):
            write = threads.submit((tmp_path / "pipe").write_bytes, content)
            assert read_bytes(Source(str(tmp_path / "pipe"), 0, length)).tobytes() == content
            write.result()


class Declares(Dataset[int]):
    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: int) -> int:
        return key

    def source(self, key: int) -> Source:
        return Source(f"{self.name}{key}")


class Silent(Dataset[int]):
    def __len__(self) -> int:
        return 3


def test_wrappers_of_torch_are_seen_through() -> None:
    declared = source_of(Subset(Declares("a"), [2, 0]))
    assert declared is not None
    assert [declared(key).path for key in range(2)] == ["a2", "a0"]
    both = source_of(ConcatDataset([Declares("a"), Subset(Declares("b"), [1, 2])]))
    assert both is not None
    assert [both(key).path for key in (0, 2, 3, 4, -1)] == ["a0", "a2", "b1", "b2", "b2"]
    assert source_of(ConcatDataset([Declares("a"), Silent()])) is None
    assert source_of(Subset(Silent(), [0])) is None
    assert source_of([1, 2]) is None


def test_an_attribute_that_raises_declares_nothing_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Of a data set that means something else by it; read one by one it is not asked for."""

    class Connected(Silent):
        def __getitem__(self, index: int) -> int:
            return index

        @property
        def source(self) -> str:
            raise ConnectionError("not connected")

    assert source_of(Connected()) is None and source_of(Subset(Connected(), [0])) is None
    assert "The attribute 'source' of the data set (Connected) raised ConnectionError('not connected')" in caplog.text
    assert [batch.tolist() for batch in DataLoader(Connected(), 2, num_workers=1)] == [[0, 1], [2]]


# --- parts of URLs, by who reads ahead and by workers ------------------------------------------------------------


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, list[str]]]:
    pytest.importorskip("aiohttp")
    found: dict[str, dict[str, list[str]]] = json.loads(programs.run("tests.sources.ranges"))
    return found


EXPECTED = [CONTENT[begin : None if length is None else begin + length].decode() for begin, length in PARTS]


@pytest.mark.parametrize("who", ["ahead", "by worker"])
def test_parts_are_what_is_declared(said: dict[str, dict[str, list[str]]], who: str) -> None:
    """Also none of it, which is no range that a server knows."""
    assert said["ranges"][who] == EXPECTED


@pytest.mark.parametrize("who", ["ahead", "by worker"])
def test_a_server_that_knows_no_ranges_gives_no_other_bytes(said: dict[str, dict[str, list[str]]], who: str) -> None:
    for (begin, length), found, expected in zip(PARTS, said["whole"][who], EXPECTED, strict=True):
        if length != 0 and (begin, length) not in ((0, None), (0, len(CONTENT))):
            assert found.startswith("UnsupportedOperation: http://127.0.0.1:"), (begin, length, found)
            assert "]: the server does not send parts, but all of it; declare a source without" in found
        else:
            assert found == expected


class _OfHost(AbstractFileSystem):  # type: ignore[misc]
    """A file holds the host that its file system was made for, as of sftp, ftp, smb, webhdfs."""

    def __init__(self, host: str = "none", **more: Any) -> None:
        super().__init__(**more)
        self.host = host

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(infer_storage_options(path)["path"])

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"host": infer_storage_options(path)["host"]}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self.host.encode()[start:end]


class _AsyncOfHost(_OfHost, AsyncFileSystem):  # type: ignore[misc]
    """As abfs."""

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self.host.encode()[start:end]


@pytest.mark.parametrize(("protocol", "kind"), [("hosts", _OfHost), ("asynchosts", _AsyncOfHost)])
def test_urls_of_several_hosts_are_each_read_from_their_own(protocol: str, kind: type[_OfHost]) -> None:
    fsspec.register_implementation(protocol, kind, clobber=True)
    sources = [Source(f"{protocol}://{host}/1.bin", 0, len(host)) for host in ("alpha", "beta", "alpha")]

    async def read() -> list[bytes]:
        remote = RemoteReads()
        first = await asyncio.gather(*map(remote.read, sources))
        await remote.close()
        return first

    assert asyncio.run(read()) == [b"alpha", b"beta", b"alpha"]
