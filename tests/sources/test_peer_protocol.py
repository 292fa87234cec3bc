"""What hosts say to each other: nothing before the token, nothing wrong is believed, and noise ends a connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct

import pytest

from minato_gpu.sources import peers
from minato_gpu.sources.cluster_token import CODE_BYTES, NONCE_BYTES, code
from minato_gpu.sources.peers import ANSWER, CANNOT, MAGIC, READING, REQUEST
from minato_gpu.sources.source import Source
from tests.sources.loops import in_a_loop
from tests.sources.test_peers import FILES, Host, _token, content, files, hosts, impostor

_ = _token, files


async def meet(host: Host) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to a host as a peer that knows the token."""
    reader, writer = await asyncio.open_connection(*host.address.split(":"))
    theirs, own = await reader.readexactly(len(MAGIC) + NONCE_BYTES), os.urandom(NONCE_BYTES)
    nonces = theirs[len(MAGIC) :] + own
    writer.write(own + code(b"client", nonces))
    assert await reader.readexactly(CODE_BYTES) == code(b"server", nonces)
    return reader, writer


@in_a_loop
async def test_an_owner_whose_storage_is_slow_says_that_it_is_reading(
    files: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "BEAT_S", 0.01)

    async with hosts(1) as [host]:
        read, held = host.storage.submit, list[tuple[int, Source]]()
        monkeypatch.setattr(host.storage, "submit", lambda *wanted: held.append(wanted))
        reader, writer = await meet(host)
        request = json.dumps(files[3].key).encode()
        writer.write(REQUEST.pack(len(request)) + request)
        for _ in range(3):
            assert await reader.readexactly(ANSWER.size) == ANSWER.pack(READING, 0)
        read(*held[0])
        nbytes = READING
        while nbytes == READING:
            nbytes, _ = ANSWER.unpack(await reader.readexactly(ANSWER.size))
        assert await reader.readexactly(nbytes) == content([files[3]])[0]
        writer.close()


@pytest.mark.parametrize(
    ("says", "knows", "why"),
    [
        (b"", False, "token"),
        (ANSWER.pack(3, 0) + b"abc", True, "checksum"),
        (ANSWER.pack(1 << 62, 0), True, "it sends 4611686018427387904 bytes"),
        (ANSWER.pack(CANNOT, 0), True, ""),
    ],
)
@in_a_loop
async def test_a_peer_that_answers_wrongly_changes_nothing(
    files: list[Source], says: bytes, knows: bool, why: str
) -> None:
    async with hosts(1) as [host]:
        server = await asyncio.start_server(lambda r, w: impostor(r, w, knows, says), "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        host.peers.join(host.address, (host.address, address))
        for source, data in zip(files[1:FILES], content(files[1:FILES]), strict=True):  # half of them are its own
            assert await host.read(source) == [data]
        assert why in host.peers.why and bool(host.peers.counts()["left_out"]) == bool(why)
        server.close()


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(NONCE_BYTES + CODE_BYTES)])
@in_a_loop
async def test_nothing_is_sent_to_whoever_does_not_know_the_token(files: list[Source], says: bytes) -> None:
    async with hosts(1) as [host]:
        reader, writer = await asyncio.open_connection(*host.address.split(":"))
        request = json.dumps(files[3].key).encode()
        writer.write(says + REQUEST.pack(len(request)) + request)
        writer.write_eof()
        said = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while more := await reader.read(1000):
                said += more
        assert said.removeprefix(MAGIC)[NONCE_BYTES:].strip(b"\0") == b""
        writer.close()
        assert host.server.served == 0


@pytest.mark.parametrize(
    "request_", [struct.pack("<I", 1 << 31), REQUEST.pack(4) + b"null", REQUEST.pack(6) + b"[1, 2]", REQUEST.pack(3)]
)
@in_a_loop
async def test_noise_of_a_peer_ends_its_connection(files: list[Source], request_: bytes) -> None:
    async with hosts(1) as [host]:
        reader, writer = await meet(host)
        writer.write(request_)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        assert await host.read(files[5]) == content([files[5]])
