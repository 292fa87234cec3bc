"""Caches of several hosts as one: what is kept where, what becomes of it as hosts leave and come back; and what hosts
say to each other: nothing before the token, nothing wrong is believed, and noise ends a connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from minato_gpu.memory.arena import Arena
from minato_gpu.sources import peers
from minato_gpu.sources.cluster_token import CODE_BYTES, NONCE_BYTES, TOKEN, code
from minato_gpu.sources.peer_discovery import split_address
from minato_gpu.sources.peers import ANSWER, CANNOT, MAGIC, READING, REQUEST, PeerPool, PeerServer, owner_of
from minato_gpu.sources.pool import ReaderPool
from minato_gpu.sources.service import Ready, Service
from minato_gpu.sources.shared_reads import ClientPool, SharedReads, SharedTier
from minato_gpu.sources.source import Source
from tests.sources.loops import in_a_loop

FILES = 40


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    """Files of different sizes, one empty and the last one missing."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(FILES):
        (folder / str(number)).write_bytes(bytes([number]) * (1000 * number))
    return [Source(str(folder / str(number))) for number in range(FILES + 1)]


class Host:
    """One host's reader process, but for its loaders' sockets."""

    def __init__(self, budget: int = 10**8) -> None:
        loop = asyncio.get_running_loop()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.arena, self.memory = Arena("test"), SharedTier(budget)
        self.reads = SharedReads(self.arena, loop.call_soon)
        self.storage = ReaderPool(self.reads.blocks, self.reads.done)
        self.peers = self.reads.pool = PeerPool(self.storage, self.reads.blocks, self.reads.done)
        self.memory.owns = self.peers.owns
        self.server = PeerServer(self.listening, self.reads.blocks, self.memory.part(), self._client)
        self.service = Service(self.reads.blocks, 10**8, self._ready, self.memory.part())
        self.service.pool = self._client(self.service)
        self._waiting: dict[int, asyncio.Future[bytes | None]] = {}
        self._numbers = 0

    def _client(self, service: Service) -> ClientPool:
        return self.reads.client(service, self.storage)

    def _ready(self, ready: Ready) -> None:
        number, places = ready
        found = bytes(self.reads.blocks.view(*places[0][:2])) if places else None
        self._waiting.pop(number).set_result(found)

    async def read(self, *sources: Source) -> list[bytes | None]:
        """What a loader of this host is given, None for what cannot be read."""
        numbers = range(self._numbers, self._numbers + len(sources))
        self._numbers += len(sources)
        waiting = [self._waiting.setdefault(n, asyncio.get_running_loop().create_future()) for n in numbers]
        for number, source in zip(numbers, sources, strict=True):
            self.service.want(number, [(number, number, (source.key,))])
        found = await asyncio.gather(*waiting)
        self.service.release(numbers)
        return found

    @property
    def from_storage(self) -> int:
        return self.service.reads + self.server._service.reads

    async def close(self) -> None:
        self.server.close()
        self.peers.close()
        await self.storage.close()
        self.arena.close()


@asynccontextmanager
async def hosts(count: int, **options: Any) -> AsyncIterator[list[Host]]:
    """Hosts whose caches are one."""
    made = [Host(**options) for _ in range(count)]
    for host in made:
        host.peers.join(host.address, tuple(each.address for each in made))
    try:
        yield made
    finally:
        for host in made:
            await host.close()


def content(sources: list[Source]) -> list[bytes]:
    return [Path(source.path).read_bytes() for source in sources]


async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, knows: bool, says: bytes = b"") -> None:
    """A peer that meets the other properly if it ``knows`` the token, and then says this."""
    own = os.urandom(NONCE_BYTES)
    writer.write(MAGIC + own)
    with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
        theirs = await reader.readexactly(NONCE_BYTES + CODE_BYTES)
        writer.write(code(b"server", own + theirs[:NONCE_BYTES]) if knows else bytes(CODE_BYTES))
        while knows:
            (length,) = REQUEST.unpack(await reader.readexactly(REQUEST.size))
            await reader.readexactly(length)
            writer.write(says)
        await reader.read()


@in_a_loop
async def test_all_hosts_together_read_each_source_once_and_keep_it_once(files: list[Source]) -> None:
    async with hosts(3) as made:
        for _ in range(3):  # epochs, in which each host reads all
            for found in await asyncio.gather(*(host.read(*files[:FILES]) for host in made)):
                assert found == content(files[:FILES])
        assert sum(host.from_storage for host in made) == FILES
        kept = [set(host.memory._items) for host in made]
        assert sum(map(len, kept)) == len(set.union(*kept)) == FILES and all(kept)
        assert sum(host.service.from_peers for host in made) > FILES
        assert all(host.peers.counts()["failed"] == 0 for host in made)


def test_each_host_owns_an_equal_share_and_only_what_a_host_owned_moves() -> None:
    addresses, names = ("a:1", "b:1", "c:1", "d:1"), [b"%d" % number for number in range(4000)]
    before = [owner_of(name, addresses) for name in names]
    assert before == [owner_of(name, addresses[::-1]) for name in names]
    assert all(abs(count - 1000) < 120 for count in Counter(before).values()) and len({*before}) == 4
    after = [owner_of(name, ("a:1", "b:1", "d:1")) for name in names]
    assert all(
        new == old if old != "c:1" else new in ("a:1", "b:1", "d:1") for old, new in zip(before, after, strict=True)
    )
    assert owner_of(b"any", ()) is None


@in_a_loop
async def test_a_host_that_leaves_costs_its_share_once(files: list[Source]) -> None:
    async with hosts(3) as made:
        await asyncio.gather(*(host.read(*files[:FILES]) for host in made))
        *left, gone = made
        lost = len(gone.memory._items)
        gone.server.close()
        before = sum(host.from_storage for host in left)
        for _ in range(3):
            for host in left:
                assert await host.read(*files[:FILES]) == content(files[:FILES])
                assert host.peers.counts()["left_out"] == [gone.address]
        assert sum(host.from_storage for host in left) - before == lost


@in_a_loop
async def test_a_host_that_has_left_is_asked_again_once_it_is_back(
    files: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "AGAIN_S", 0.01)

    async with hosts(2, budget=0) as [host, other]:
        other.server.close()
        assert await host.read(*files[:FILES]) == content(files[:FILES])
        assert host.peers.counts()["left_out"] == [other.address]
        listening = socket.create_server(split_address(other.address))
        other.server = PeerServer(listening, other.reads.blocks, other.memory.part(), other._client)
        while host.peers.counts()["left_out"]:
            await asyncio.sleep(0.01)
        assert host.peers.why == "" and await host.read(*files[:FILES]) == content(files[:FILES])
        assert other.server.served > 0 and host.peers.failed == 1


@in_a_loop
async def test_a_host_that_is_stopped_is_waited_for_once(files: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SILENCE_S", 0.2)

    async with hosts(1) as [host]:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and nobody answers
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            host.peers.join(host.address, (host.address, address))
            assert await host.read(*files[:FILES]) == content(files[:FILES])
            assert host.peers.counts()["left_out"] == [address]
            assert "TimeoutError" in host.peers.why


@in_a_loop
async def test_a_connection_that_the_other_side_has_closed_costs_nobody_a_place(files: list[Source]) -> None:
    async with hosts(2) as made:
        for _ in range(2):
            assert await made[0].read(*files[:FILES]) == content(files[:FILES])
            sessions = [*made[1].server._sessions]
            for session in sessions:
                session.cancel()
            await asyncio.wait(sessions)
        counts = made[0].peers.counts()
        assert counts["asked"] > 0 == counts["failed"], counts["why"]


# --- what hosts say to each other -----------------------------------------------------------------------------------


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
