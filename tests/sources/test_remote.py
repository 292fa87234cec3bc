"""Parts of URLs are what is declared, whoever reads them, or it is said why not."""

from __future__ import annotations

import asyncio
import json

import pytest

from minato_gpu import Source, read_bytes
from minato_gpu.sources.remote import RemoteReads
from tests import programs
from tests.sources.ranges import CONTENT, PARTS

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


@pytest.mark.parametrize("who", ["ahead", "by worker"])
def test_a_server_that_knows_no_ranges_gives_no_other_bytes(said: dict[str, dict[str, list[str]]], who: str) -> None:
    for (begin, length), found, expected in zip(PARTS, said["whole"][who], EXPECTED, strict=True):
        if begin and length is None:
            assert found.startswith("UnsupportedOperation: http://127.0.0.1:"), (begin, found)
            assert f"whole[{begin}:]: the server does not send parts, but all of it; declare" in found
        elif length:
            assert found.startswith("EOFError: "), (begin, length, found)
        else:
            assert found == expected


def test_no_storage_is_asked_for_none_of_its_bytes() -> None:
    """Those that are asked by ranges know none that is empty."""
    source = Source("memory://absent/file", 0, 0)
    assert asyncio.run(RemoteReads().read(source)) == b""
    assert read_bytes(source).tobytes() == b""
