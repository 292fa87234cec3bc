"""Caches of several hosts as one: what is kept where, and that nothing depends on another host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.utils.data import Dataset
from xxhash import xxh3_64_intdigest

from minato_gpu import DataLoader
from minato_gpu.memory.arena import Arena
from minato_gpu.sources import peers
from minato_gpu.sources.cluster_token import CODE_BYTES, NONCE_BYTES, TOKEN, code
from minato_gpu.sources.peer_discovery import ADDRESS, checked_peers, split_address
from minato_gpu.sources.peers import ANSWER, CANNOT, MAGIC, READING, REQUEST, PeerPool, PeerServer
from minato_gpu.sources.pool import ReaderPool
from minato_gpu.sources.service import Ready, Service
from minato_gpu.sources.shared_reads import ClientPool, SharedReads, SharedTier
from minato_gpu.sources.source import Source

FILES = 40
Pause = Callable[[], Coroutine[Any, Any, None]]


async def _no_pause() -> None:
    """Goes on at once."""


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


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


def content(sources: list[Source]) -> list[bytes]:
    return [Path(source.path).read_bytes() for source in sources]


def test_all_hosts_together_read_each_source_once_and_keep_it_once(files: list[Source]) -> None:
    async def work() -> None:
        async with hosts(3) as made:
            for _ in range(3):  # epochs, in which each host reads all
                for found in await asyncio.gather(*(host.read(*files[:FILES]) for host in made)):
                    assert found == content(files[:FILES])
            assert sum(host.from_storage for host in made) == FILES
            kept = [set(host.memory._items) for host in made]
            assert sum(map(len, kept)) == len(set.union(*kept)) == FILES and all(kept)
            assert sum(host.service.from_peers for host in made) > FILES
            assert all(host.peers.counts()["failed"] == 0 for host in made)

    run(work)


def test_a_host_without_memory_leaves_no_other_out(files: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with hosts(2) as (one, other):
            foreign = next(each for each in files[1:FILES] if one.peers._owner(each.key) == other.address)
            with monkeypatch.context() as full:
                full.setattr(one.reads.blocks, "allocate", Mock(side_effect=MemoryError))
                assert await one.read(foreign) == [None]
                assert one.peers.counts()["left_out"] == [] and one.peers.failed == 0
            assert await one.read(foreign) == content([foreign])
            assert one.service.from_peers == 1

    run(work)


def test_what_nobody_has_room_for_is_read_again(files: list[Source]) -> None:
    async def work() -> None:
        async with hosts(2, budget=0) as made:
            for _ in range(2):
                for host in made:
                    assert await host.read(*files[:FILES]) == content(files[:FILES])
            assert sum(host.from_storage for host in made) == 4 * FILES

    run(work)


def test_what_its_owner_cannot_read_is_read_here_and_no_host_is_left_out(files: list[Source]) -> None:
    async def work() -> None:
        async with hosts(2) as made:
            for host in made:
                assert await host.read(files[FILES]) == [None]
            assert all(not host.peers.counts()["left_out"] for host in made)

    run(work)


def test_a_host_that_leaves_costs_its_share_once(files: list[Source]) -> None:
    async def work() -> None:
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

    run(work)


def test_a_host_that_has_left_is_asked_again_once_it_is_back(
    files: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "AGAIN_S", 0.01)

    async def work() -> None:
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

    run(work)


def test_hosts_that_start_later_are_waited_for(files: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        free = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        async with hosts(1) as [host]:
            host.peers._is_looking, host.peers._hosts = True, ()
            meeting = asyncio.create_task(host.peers.meet(host.address, (host.address, address)))
            assert await host.read(files[3]) == content([files[3]]) and not host.memory._items
            server = await asyncio.start_server(lambda r, w: impostor(r, w, True), *split_address(address))
            await meeting
            assert host.peers.counts()["hosts"] == 2 and host.peers.why == ""
            monkeypatch.setattr(peers, "STARTS_S", 0.1)
            server.close()
            await host.peers.meet(host.address, (host.address, address))  # those that do not come are not waited for
            assert await host.read(*files[:FILES]) == content(files[:FILES])
            assert host.peers.counts()["left_out"] == [address]

    run(work)


async def meet(host: Host) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to a host as a peer that knows the token."""
    reader, writer = await asyncio.open_connection(*host.address.split(":"))
    theirs, own = await reader.readexactly(len(MAGIC) + NONCE_BYTES), os.urandom(NONCE_BYTES)
    nonces = theirs[len(MAGIC) :] + own
    writer.write(own + code(b"client", nonces))
    assert await reader.readexactly(CODE_BYTES) == code(b"server", nonces)
    return reader, writer


def test_an_owner_whose_storage_is_slow_says_that_it_is_reading(
    files: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "BEAT_S", 0.01)

    async def work() -> None:
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

    run(work)


def test_a_host_that_is_stopped_is_waited_for_once(files: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SILENCE_S", 0.2)

    async def work() -> None:
        async with hosts(1) as [host]:
            with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and nobody answers
                address = f"127.0.0.1:{silent.getsockname()[1]}"
                host.peers.join(host.address, (host.address, address))
                assert await host.read(*files[:FILES]) == content(files[:FILES])
                assert host.peers.counts()["left_out"] == [address]
                assert "TimeoutError" in host.peers.why

    run(work)


async def impostor(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, knows: bool, *says: bytes, pause: Pause = _no_pause
) -> None:
    """A peer that meets the other properly if it ``knows`` the token, and then says this, with a pause after each."""
    own = os.urandom(NONCE_BYTES)
    writer.write(MAGIC + own)
    with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
        theirs = await reader.readexactly(NONCE_BYTES + CODE_BYTES)
        writer.write(code(b"server", own + theirs[:NONCE_BYTES]) if knows else bytes(CODE_BYTES))
        while knows:
            (length,) = REQUEST.unpack(await reader.readexactly(REQUEST.size))
            await reader.readexactly(length)
            for each in says:
                writer.write(each)
                await pause()
        await reader.read()


@pytest.mark.parametrize(
    ("says", "knows", "why"),
    [
        (b"", False, "token"),
        (ANSWER.pack(3, 0) + b"abc", True, "checksum"),
        (ANSWER.pack(1 << 62, 0), True, "it sends 4611686018427387904 bytes"),
        (ANSWER.pack(CANNOT, 0), True, ""),
    ],
)
def test_a_peer_that_answers_wrongly_changes_nothing(files: list[Source], says: bytes, knows: bool, why: str) -> None:
    async def work() -> None:
        async with hosts(1) as [host]:
            server = await asyncio.start_server(lambda r, w: impostor(r, w, knows, says), "127.0.0.1", 0)
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            host.peers.join(host.address, (host.address, address))
            for source, data in zip(files[1:FILES], content(files[1:FILES]), strict=True):  # half of them are its own
                assert await host.read(source) == [data]
            assert why in host.peers.why and bool(host.peers.counts()["left_out"]) == bool(why)
            server.close()

    run(work)


@pytest.mark.parametrize("answers", [True, False])
def test_only_silence_counts_as_no_answer(files: list[Source], monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    """A peer reads for longer than any silence that is allowed, and says so; another one stops in its answer."""
    monkeypatch.setattr(peers, "SILENCE_S", 1000.0)
    monkeypatch.setattr(peers, "READING_S", 1e6)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        now, passed = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: now() + passed)

        async def pause() -> None:
            nonlocal passed
            for _ in range(10):  # turns of the loop, in which the other hears what was said
                await asyncio.sleep(0)
            passed += 600.0

        data = content([files[3]])[0]
        whole = ANSWER.pack(len(data), xxh3_64_intdigest(data)) + data
        says = [ANSWER.pack(READING, 0)] * 5 + [whole[:100], whole[100:]] if answers else [whole[:100], b"", b""]
        async with hosts(1) as [host]:
            server = await asyncio.start_server(lambda r, w: impostor(r, w, True, *says, pause=pause), "127.0.0.1", 0)
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            host.peers.join(host.address, (host.address, address))
            monkeypatch.setattr(host.peers, "_owner", lambda _: None if host.peers._left_out else address)
            assert await host.read(files[3]) == [data]
            assert host.service.from_peers == answers and bool(host.peers._left_out) != answers
            server.close()

    asyncio.run(work())  # `run` looks at the clock


def test_a_connection_that_the_other_side_has_closed_costs_nobody_a_place(files: list[Source]) -> None:
    async def work() -> None:
        async with hosts(2) as made:
            for _ in range(2):
                assert await made[0].read(*files[:FILES]) == content(files[:FILES])
                sessions = [*made[1].server._sessions]
                for session in sessions:
                    session.cancel()
                await asyncio.wait(sessions)
            counts = made[0].peers.counts()
            assert counts["asked"] > 0 == counts["failed"], counts["why"]

    run(work)


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(NONCE_BYTES + CODE_BYTES)])
def test_nothing_is_sent_to_whoever_does_not_know_the_token(files: list[Source], says: bytes) -> None:
    async def work() -> None:
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

    run(work)


@pytest.mark.parametrize(
    "request_", [struct.pack("<I", 1 << 31), REQUEST.pack(4) + b"null", REQUEST.pack(6) + b"[1, 2]", REQUEST.pack(3)]
)
def test_noise_of_a_peer_ends_its_connection(files: list[Source], request_: bytes) -> None:
    async def work() -> None:
        async with hosts(1) as [host]:
            reader, writer = await meet(host)
            writer.write(request_)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            assert await host.read(files[5]) == content([files[5]])

    run(work)


# --- arguments and a whole job ---------------------------------------------------------------------------------------


class Named(Dataset[int]):
    """Samples with sources."""

    def __len__(self) -> int:
        return 4

    def source(self, key: int) -> Source:
        return Source(f"/{key}")

    def __getitem__(self, key: int) -> int:
        return key


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cache_peers": ["a:1", "b:1"]}, "pass share and cache"),
        ({"cache_peers": ["a:1", "b:1"], "share": "x"}, "pass share and cache"),
        ({"cache_peers": "node1:7500", "share": "x", "cache": "1MB"}, "a list of each host's address"),
        ({"cache_peers": ["node1"], "share": "x", "cache": "1MB"}, "a host and a port"),
        ({"cache_peers": [3], "share": "x", "cache": "1MB"}, "must be a text"),
        ({"cache_peers": ["127.0.0.1:1"], "share": "x", "cache": "1MB"}, "two hosts or more"),
        ({"cache_peers": ["127.0.0.1:1", "127.0.0.1:1"], "share": "x", "cache": "1MB"}, "each once"),
        ({"cache_peers": ["127.0.0.1:1", "127.0.0.1:2"], "share": "x", "cache": "1MB"}, "more than one"),
        ({"cache_peers": ["203.0.113.1:1", "203.0.113.2:1"], "share": "x", "cache": "1MB"}, "none of"),
        ({"cache_peers": "auto", "share": "x", "cache": "1MB"}, "torchrun"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        DataLoader(Named(), num_workers=1, **given)


def test_a_token_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN)
    with pytest.raises(ValueError, match=f"{TOKEN} is not set"):
        DataLoader(Named(), num_workers=1, cache_peers=["127.0.0.1:1", "203.0.113.1:1"], share="x", cache="1MB")


def test_this_host_is_found_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked_peers(["203.0.113.1:7", "127.0.0.1:8"]) == ("127.0.0.1:8", "203.0.113.1:7", "127.0.0.1:8")
    monkeypatch.setenv(ADDRESS, "127.0.0.1:9")
    with pytest.raises(ValueError, match="none of cache_peers"):
        checked_peers(["203.0.113.1:7", "127.0.0.1:8"])


_HOST = """
import os, sys, time
from pathlib import Path
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
os.environ |= {
    "XDG_RUNTIME_DIR": str(folder / f"runtime{rank}"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[3],
    "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job",
}
from torch.utils.data import DistributedSampler
from minato_gpu import DataLoader, Source, read_bytes

class Files:
    def __len__(self):
        return 40

    def source(self, key):
        return Source(str(folder / "files" / str(key)))

    def __getitem__(self, key):
        return int(read_bytes(self.source(key))[0]), key

sampler = DistributedSampler(Files(), 2, rank, seed=1)
loader = DataLoader(
    Files(), 5, sampler=sampler, num_workers=1, share=True, cache="10MB", cache_peers="auto"
)
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for values, keys in loader:
        assert values.tolist() == keys.tolist()
    reads = loader.stats()["reads"]
    print(epoch, reads["reads"], reads["from_peers"], reads["peers"]["hosts"], reads["peers"]["why"] or "-", flush=True)
    if sys.stdin.readline() == "end\\n":  # all have come so far
        break
"""


def test_hosts_of_a_torchrun_job_find_each_other_and_read_storage_once(tmp_path: Path) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    (tmp_path / "files").mkdir()
    for number in range(40):
        (tmp_path / "files" / str(number)).write_bytes(bytes([number]) * 100)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs = []
    for rank in range(2):
        (tmp_path / f"runtime{rank}").mkdir(0o700)
        arguments = [sys.executable, "-W", "error", "-c", _HOST, str(rank), str(tmp_path), str(store.port)]
        jobs.append(subprocess.Popen(arguments, **pipes))  # type: ignore[call-overload]
    try:
        rows: list[list[str]] = []

        def epoch(then: str) -> None:
            rows[:] = [job.stdout.readline().split() for job in jobs]
            assert all(rows), "a host has ended"
            for job in jobs:
                job.stdin.write(f"{then}\n")
                job.stdin.flush()

        epoch("on")
        while any(row[3:] != ["2", "-"] for row in rows):  # until they have found each other
            epoch("on")
        for then in ("on", "on", "end"):  # the first of these may have been begun before that
            epoch(then)
        assert [job.wait(60) for job in jobs] == [0, 0]
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    assert all(row[1] == "0" and int(row[2]) > 0 and row[3:] == ["2", "-"] for row in rows), rows
