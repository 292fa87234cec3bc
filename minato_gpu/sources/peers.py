"""Caches of several hosts as one (``cache_peers``): what another host keeps comes from there, and not from storage.

Each host has one reader process (host_reader.py). Every source has one owner among them (``owner_of``), which
alone keeps it in memory. A read that no tier of this host answers goes to the owner: it sends its copy, or reads the
source from storage, keeps it if there is room, and sends it. So each source is read once by all hosts together, while
they have room for the set. An owner whose storage is slow says every ``BEAT_S`` that it is still reading. One that says
nothing for ``SILENCE_S``, or answers wrongly, is left out until it can be connected to again, which is tried every
``AGAIN_S``: its sources have other owners meanwhile, who are asked.

A connection carries one request at a time; a peer may have ``CONNECTIONS``. Both sides prove that they know the token
before anything else is said. A request is a source as JSON; an answer is a head (``ANSWER``) and the bytes, which are
sent from the block in shared memory and received into one. Lengths are bounded, and nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from hashlib import blake2b
from typing import Any

from xxhash import xxh3_64_intdigest

from minato_gpu.sources.blocks import IN_PAGE_CACHE, Blocks
from minato_gpu.sources.cluster_token import CODE_BYTES, NONCE_BYTES, code, proves
from minato_gpu.sources.memory_tier import MemoryTier
from minato_gpu.sources.peer_discovery import split_address
from minato_gpu.sources.pool import Pool, ReaderPool
from minato_gpu.sources.reading import Place, read_now
from minato_gpu.sources.service import Ready, Service
from minato_gpu.sources.source import Key, Source

SILENCE_S = 5.0  # after which a peer is taken to be gone
BEAT_S = 1.0
READING_S = 60.0  # that a peer may be reading: hosts with unlike lists of addresses could wait for each other for ever
AGAIN_S = 10.0
_LOOK_S = 0.1
STARTS_S = 60.0  # seconds that hosts wait for each other before they are one cache
CONNECTIONS = 32  # to each peer
MAGIC = b"minato peers 3\n\0"
REQUEST = struct.Struct("<I")  # bytes of the request that follows
ANSWER = struct.Struct("<QQ")  # bytes that follow, and their checksum
CANNOT, READING = (1 << 64) - 1, (1 << 64) - 2  # in place of the length: it cannot be read; it is still being read
_LONGEST_REQUEST = 1 << 16
_LARGEST = 1 << 40  # bytes of a source
_GUESTS_BYTES = 64 << 20  # read for other hosts and not sent yet
_PIECE = 1 << 20  # bytes that are sent without a look at the clock
_IDLE_S = 60.0  # after which a connection that says nothing is closed


class PeerError(OSError):
    """A peer sends an invalid message, or does not know the token."""


def owner_of(name: bytes, hosts: Iterable[str]) -> str | None:
    """Returns the host of these that keeps what has this name; None if there are none.

    Method: rendezvous hashing (Thaler and Ravishankar 1998). Every host finds the same owner without asking, each owns
    an equal share, and where a host leaves only what it owned has new owners. CoorDL (VLDB 2021) partitions caches
    likewise.
    """
    return max(hosts, key=lambda host: blake2b(b"%s %s" % (host.encode(), name)).digest(), default=None)


class PeerPool:
    """A pool that asks other hosts for what they own, and has ``pool`` read everything else.

    ``done`` is called as a ReaderPool calls its own, with ``from_peer=True`` where the bytes came from another host.
    """

    def __init__(self, pool: ReaderPool, blocks: Blocks, done: Callable[..., None]) -> None:
        self._pool, self._blocks, self._done = pool, blocks, done
        self._loop = asyncio.get_running_loop()
        self._hosts: tuple[str, ...] = ()  # known later than the first reads, where peers are found
        self._address = ""
        self._peers: dict[str, _Peer] = {}
        # tasks that try to reach the hosts that are left out, by address
        self._left_out: dict[str, asyncio.Task[None]] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self.why = "other hosts are not known yet"
        self._is_looking = True  # for them
        self.asked = self.failed = 0

    def join(self, address: str, addresses: tuple[str, ...]) -> None:
        """Makes these hosts the owners of what is read; ``address``, one of them, is this host's."""
        self._hosts, self._address, self.why, self._is_looking = addresses, address, "", False
        self._peers = {each: _Peer(each) for each in addresses if each != address}

    async def meet(self, address: str, addresses: tuple[str, ...]) -> None:
        """Joins hosts as soon as all of them can be reached, or ``STARTS_S`` have passed: they start at any time.

        One that begins before another is there would read and keep what the other one is to.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(STARTS_S):
                await asyncio.gather(*(_Peer(each).reach(_LOOK_S) for each in addresses if each != address))
        self.join(address, addresses)

    def stay_alone(self, why: str) -> None:
        """Gives other hosts up, for the reason ``why``: this host keeps what it reads."""
        self.why, self._is_looking = why, False

    def owns(self, key: Key) -> bool:
        """Returns whether this host is to keep the source. False for all while other hosts are being looked for."""
        return not self._is_looking and self._owner(key) in (None, self._address)

    def _owner(self, key: Key) -> str | None:
        return owner_of(json.dumps(key).encode(), (host for host in self._hosts if host not in self._left_out))

    def submit(self, number: int, source: Source) -> None:
        """Reads a source: asks the host that owns it, or has ``pool`` read it."""
        owner = self._owner(source.key)
        if owner is None or owner == self._address:
            self._pool.submit(number, source)
        else:
            self._asking[number] = self._loop.create_task(self._ask(number, source, self._peers[owner]))

    def hasten(self, number: int, sooner: int, source: Source) -> bool:
        """Gives a read of ``pool`` a lower number. Returns False if it has begun, or another host was asked."""
        return number not in self._asking and self._pool.hasten(number, sooner, source)

    def cancel(self, number: int) -> None:
        """Cancels a read of ``pool``. What another host has been asked for comes all the same."""
        if number not in self._asking:
            self._pool.cancel(number)

    async def _ask(self, number: int, source: Source, peer: _Peer) -> None:
        self.asked += 1
        try:
            async with peer.free:
                if peer.address in self._left_out:  # since this has waited
                    raise PeerError
                found = await peer.read(source, self._blocks)
        except MemoryError:  # of this host, which has no room: the peer has done nothing wrong
            found = None
        except (OSError, ValueError) as error:
            self._leave_out(peer, error)
            del self._asking[number]
            self.submit(number, source)
            return
        del self._asking[number]
        if found is None:  # this host may be able to
            self._pool.submit(number, source)
        else:
            self._done(number, *found, None, from_peer=True)

    def _leave_out(self, peer: _Peer, error: Exception) -> None:
        if peer.address not in self._left_out:
            self.failed += 1
            self.why = f"{peer.address} is left out: {type(error).__name__} {error}"
            self._left_out[peer.address] = self._loop.create_task(self._take_back(peer))
            peer.close()

    async def _take_back(self, peer: _Peer) -> None:
        """Waits until a peer can be reached again."""
        await peer.reach(AGAIN_S)
        del self._left_out[peer.address]
        self.why = self.why if self._left_out else ""

    def close(self) -> None:
        """Closes all connections that nobody uses, and tries no more to reach hosts that are left out."""
        for task in self._left_out.values():
            task.cancel()
        for peer in self._peers.values():
            peer.close()

    def counts(self) -> dict[str, Any]:
        """Returns what has been asked of other hosts, and which are left out."""
        left_out = sorted(self._left_out)
        counts = {"hosts": len(self._hosts) or 1, "asked": self.asked, "failed": self.failed}
        return counts | {"left_out": left_out, "why": self.why}


class _Peer:
    """Another host: its address, and idle connections to it. ``free`` is held during a read: it limits their number."""

    def __init__(self, address: str) -> None:
        self.address, self.free = address, asyncio.Semaphore(CONNECTIONS)
        self._idle: deque[socket.socket] = deque()

    async def reach(self, every_s: float) -> None:
        """Waits ``every_s`` seconds and tries to connect, until that succeeds."""
        while True:
            await asyncio.sleep(every_s)
            with suppress(OSError):
                (await _connected(self.address)).close()
                return

    async def read(self, source: Source, blocks: Blocks) -> tuple[int, int] | None:
        """Returns the block with the source's bytes, and how many there are; None where the peer cannot read it.

        Raises OSError where it does not answer or answers wrongly, MemoryError if no block is free here.
        """
        request = json.dumps(source.key).encode()
        if len(request) > _LONGEST_REQUEST:
            return None
        while True:
            is_used = bool(self._idle)
            end = self._idle.pop() if is_used else await _connected(self.address)
            try:
                found = await _asked(end, request, source, blocks)
            except ConnectionError:
                end.close()
                if not is_used:  # else the peer may have closed it because it was idle
                    raise
            except BaseException:
                end.close()
                raise
            else:
                self._idle.append(end)
                return found

    def close(self) -> None:
        """Closes the connections that nobody uses."""
        while self._idle:
            self._idle.pop().close()


async def _asked(end: socket.socket, request: bytes, source: Source, blocks: Blocks) -> tuple[int, int] | None:
    """Returns a block with what the peer sends, and its bytes; None where it cannot read the source."""
    await _send(end, REQUEST.pack(len(request)), request)
    nbytes = READING
    async with asyncio.timeout(READING_S):
        while nbytes == READING:
            nbytes, checksum = ANSWER.unpack(await _exactly(end, ANSWER.size))
    if nbytes == CANNOT:
        return None
    if nbytes > _LARGEST or source.length not in (None, nbytes):
        raise PeerError(f"it sends {nbytes} bytes of {source}")
    block, view = blocks.allocate(nbytes)
    try:
        await _receive(end, view)
        if xxh3_64_intdigest(view) != checksum:
            raise PeerError("what it sent has another checksum")
    except BaseException:
        blocks.free(block)
        raise
    return block, nbytes


async def _connected(address: str) -> socket.socket:
    """Returns a connection to the peer, after both have proven that they know the token."""
    loop = asyncio.get_running_loop()
    host, port = split_address(address)
    async with asyncio.timeout(SILENCE_S):
        family, _, _, _, found = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    end = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(SILENCE_S):
            await loop.sock_connect(end, found)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        said = await _exactly(end, len(MAGIC) + NONCE_BYTES)
        if not said.startswith(MAGIC):
            raise PeerError(f"it is no cache of this version of minato_gpu: it says {said[:16]!r}")
        own = secrets.token_bytes(NONCE_BYTES)
        nonces = said[len(MAGIC) :] + own
        await loop.sock_sendall(end, own + code(b"client", nonces))
        if not proves(await _exactly(end, CODE_BYTES), b"server", nonces):
            raise PeerError("it does not know this token: set the same MINATO_GPU_TOKEN on all hosts")
    except BaseException:
        end.close()
        raise
    return end


class PeerServer:
    """Answers other hosts' requests: ``listening`` is a TCP socket that nobody else accepts from.

    A service of its own (``pool_of`` makes its pool) reads what is asked for, as one for a loader of this host does:
    so what a loader reads, or ``memory`` keeps (None: nothing), is not read again.
    """

    def __init__(
        self, listening: socket.socket, blocks: Blocks, memory: MemoryTier | None, pool_of: Callable[[Service], Pool]
    ) -> None:
        self.served = self.served_bytes = 0
        self._listening, self._blocks = listening, blocks
        self._service = Service(blocks, _GUESTS_BYTES, self._ready, memory)
        self._service.pool = pool_of(self._service)
        self._waiting: dict[int, asyncio.Future[tuple[Place, ...]]] = {}
        self._requests = 0
        self._sessions: set[asyncio.Task[None]] = set()
        self._task = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        while True:
            try:
                end, _ = await loop.sock_accept(self._listening)
            except OSError:  # descriptors are short
                await asyncio.sleep(1.0)
                continue
            session = loop.create_task(self._serve(end))
            self._sessions.add(session)
            session.add_done_callback(self._sessions.discard)

    async def _serve(self, end: socket.socket) -> None:
        """Serves one connection, until the peer closes it or sends an invalid message."""
        with closing(end), suppress(OSError):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(SILENCE_S):
                await self._greet(end)
            while True:
                await self._answer(end, await _request(end))

    async def _greet(self, end: socket.socket) -> None:
        loop, own = asyncio.get_running_loop(), secrets.token_bytes(NONCE_BYTES)
        await loop.sock_sendall(end, MAGIC + own)
        said = await _exactly(end, NONCE_BYTES + CODE_BYTES)
        nonces = own + said[:NONCE_BYTES]
        if not proves(said[NONCE_BYTES:], b"client", nonces):
            await loop.sock_sendall(end, bytes(CODE_BYTES))
            raise PeerError("it does not know the token")
        await loop.sock_sendall(end, code(b"server", nonces))

    async def _answer(self, end: socket.socket, key: Key) -> None:
        """Sends the bytes of a source, or that it cannot be read."""
        number = self._requests
        self._requests += 1
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._service.want(number, [(number, 0, (key,))])
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=BEAT_S)
                if not waiting.done():
                    await _send(end, ANSWER.pack(READING, 0))
            data = await self._bytes(key, waiting.result())
            if data is None:
                await _send(end, ANSWER.pack(CANNOT, 0))
                return
            await _send(end, ANSWER.pack(len(data), xxh3_64_intdigest(data)), data)
            self.served += 1
            self.served_bytes += len(data)
        finally:
            del self._waiting[number]
            self._service.release([number])

    async def _bytes(self, key: Key, places: tuple[Place, ...]) -> Any:
        """Returns the bytes that are stored there; None if they could not be read."""
        if not places:
            return None
        block, nbytes = places[0][:2]
        if block != IN_PAGE_CACHE:
            return self._blocks.view(block, nbytes)
        try:
            return (await asyncio.to_thread(read_now, Source.of(key))).data
        except (OSError, EOFError):
            return None

    def _ready(self, ready: Ready) -> None:
        number, places = ready
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(tuple(places))

    def close(self) -> None:
        """Ends all connections, and accepts no more."""
        for task in (self._task, *self._sessions):
            task.cancel()
        self._listening.close()

    def counts(self) -> dict[str, int]:
        """Returns what other hosts were sent."""
        return {"served": self.served, "served_bytes": self.served_bytes}


async def _send(end: socket.socket, head: bytes, data: bytes | memoryview = b"") -> None:
    """Sends both, by one call where the socket has room for them. Raises TimeoutError where nobody takes them."""
    sent = -len(head)  # of the data
    with suppress(BlockingIOError):
        sent += end.sendmsg((head, data))
    pieces = [head[sent:]] if sent < 0 else []
    for piece in (*pieces, *(data[at : at + _PIECE] for at in range(max(sent, 0), len(data), _PIECE))):
        async with asyncio.timeout(SILENCE_S):
            await asyncio.get_running_loop().sock_sendall(end, piece)


async def _request(end: socket.socket) -> Key:
    """Returns the key of the source that a peer asks for. Raises OSError for what is no request."""
    (length,) = REQUEST.unpack(await _exactly(end, REQUEST.size, _IDLE_S))
    if length > _LONGEST_REQUEST:
        raise PeerError("invalid message")
    said = await _exactly(end, length)
    try:
        path, offset, size, *version = json.loads(said)
        key = (str(path), int(offset), None if size is None else int(size))
        Source(*key)  # raises for what is none
    except (TypeError, ValueError) as error:
        raise PeerError(f"invalid message: {error}") from error
    return (*key, str(version[0])) if version else key


async def _exactly(end: socket.socket, count: int, silence_s: float | None = None) -> bytes:
    data = bytearray(count)
    await _receive(end, memoryview(data), silence_s)
    return bytes(data)


async def _receive(end: socket.socket, view: memoryview, silence_s: float | None = None) -> None:
    """Fills the memory. Raises ConnectionError where the other end is closed before, TimeoutError after silence."""
    loop, at = asyncio.get_running_loop(), 0
    while at < len(view):
        async with asyncio.timeout(SILENCE_S if silence_s is None else silence_s):
            count = await loop.sock_recv_into(end, view[at:])
        if not count:
            raise ConnectionError("it has closed the connection")
        at += count
