"""Parts of URLs are what is declared, whoever reads them, or it is said why not."""

from __future__ import annotations

import asyncio
import json
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem
from fsspec.utils import infer_storage_options

from minato_gpu import Source, read_bytes
from minato_gpu.sources.remote import RemoteReads
from tests.sources.ranges import CONTENT, PARTS
from tests.support import programs

pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = json.loads(programs.run("tests.sources.ranges"))
    return found


EXPECTED = [CONTENT[begin : None if length is None else begin + length].decode() for begin, length in PARTS]


@pytest.mark.parametrize("who", ["ahead", "by worker"])
def test_parts_are_what_is_declared(said: dict[str, dict[str, list[str]]], who: str) -> None:
    """Also none of it, which is no range that a server knows."""
    assert said["ranges"][who] == EXPECTED


def test_a_part_beyond_the_end_ends_too_early() -> None:
    fsspec.filesystem("memory").pipe("/short", b"0123")
    source = Source("memory://short", 2, 5)
    with pytest.raises(EOFError, match="ends 3 bytes too early"):
        asyncio.run(RemoteReads().read(source))
    with pytest.raises(EOFError, match="ends 3 bytes too early"):
        read_bytes(source)


@pytest.mark.parametrize("who", ["ahead", "by worker"])
def test_a_server_that_knows_no_ranges_gives_no_other_bytes(said: dict[str, dict[str, list[str]]], who: str) -> None:
    for (begin, length), found, expected in zip(PARTS, said["whole"][who], EXPECTED, strict=True):
        if length != 0 and (begin, length) not in ((0, None), (0, len(CONTENT))):
            assert found.startswith("UnsupportedOperation: http://127.0.0.1:"), (begin, length, found)
            assert "]: the server does not send parts, but all of it; declare a source without" in found
        else:
            assert found == expected


def test_no_storage_is_asked_for_none_of_its_bytes() -> None:
    """Those that are asked by ranges know none that is empty."""
    source = Source("memory://absent/file", 0, 0)
    assert asyncio.run(RemoteReads().read(source)) == b""
    assert read_bytes(source).tobytes() == b""


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
    """Also with a new session. (The class of a protocol is looked up once in a process: each kind has its own.)"""
    fsspec.register_implementation(protocol, kind, clobber=True)
    sources = [Source(f"{protocol}://{host}/1.bin", 0, len(host)) for host in ("alpha", "beta", "alpha")]

    async def read() -> list[bytes]:
        remote = RemoteReads()
        first = await asyncio.gather(*map(remote.read, sources))
        remote.renew(sources[1])
        again = await remote.read(sources[1])
        await remote.close()
        return [*first, again]

    assert asyncio.run(read()) == [b"alpha", b"beta", b"alpha", b"beta"]


def test_a_chained_url_is_read_from_the_file_system_that_it_names(tmp_path: Path) -> None:
    for name in ("one", "other"):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr("a.txt", name)
    sources = [Source(f"zip://a.txt::file://{tmp_path}/{name}.zip") for name in ("one", "other")]

    async def read() -> list[bytes]:
        return await asyncio.gather(*map(RemoteReads().read, sources))

    assert asyncio.run(read()) == [b"one", b"other"]
