"""A reader process that loaders of a host share (``share="NAME"``): it listens in the user's private folder.

The first loader starts it, with its own budget (shared_reader.py). It is no child of that loader's process, and has a
session of its own: neither Ctrl-C nor the end of that process ends it. It ends ``LINGER_S`` after the last loader has
left, and removes its name. Each loader has a link (process.py), a service and a window as it would have alone.

Its name has the number of the protocol: loaders of another version of this package have another process.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import socket
from pathlib import Path
from typing import Any, NamedTuple

from minato_gpu.memory.arena import Arena
from minato_gpu.memory.private_folder import PrivateFolder, is_ours
from minato_gpu.sources import peer_discovery
from minato_gpu.sources.messages import SOCKET_BYTES
from minato_gpu.sources.peers import PeerPool, PeerServer
from minato_gpu.sources.pool import ReaderPool
from minato_gpu.sources.prepared_samples import PreparedSamples
from minato_gpu.sources.process import Link, ReaderSettings, failed
from minato_gpu.sources.service import Service
from minato_gpu.sources.shared_reads import ClientPool, SharedReads, SharedTier

PROTOCOL = 6
"""Number of the protocol. It goes up with every change of messages between loaders and this process, or of the
stamps of blocks (blocks.py)."""
LINGER_S = 5.0
LARGEST = 1 << 16  # bytes of a loader's first message
_PAUSE_S = 1.0  # until connections are accepted again after this process has run out of descriptors
_LOCK_S = 0.1  # until the folder's lock is tried again
_FIRST_MESSAGE_S = 5.0  # how long the process waits for the first message of a connection before it may end


class Answer(NamedTuple):
    """The first message to a loader. Sizes are in bytes."""

    pid: int  # of the reader process
    capacity: int  # of the arena
    memory_bytes: int  # budget of the copies that stay in it
    samples_capacity: int  # of the arena of prepared samples; of no meaning if none are shared
    share_bytes: int  # budget of those; 0: none are shared
    peers: tuple[str, ...]  # hosts whose caches are one with it, see peer_discovery.checked_peers; (): none


def name_of(share: str) -> str:
    """Returns the name of the socket of a ``share``."""
    return f"share-{PROTOCOL}-{share}"


def main(
    arena: Arena, of_samples: Arena | None, listening: socket.socket, share: str, settings: ReaderSettings
) -> None:
    """Starts the reader process as a child, and ends the calling process at once; returns in neither.

    ``arena``: memory for what is read; ``of_samples``: for prepared samples (None: none are shared); ``listening``: the
    socket to which loaders connect.
    """
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        _release_other_descriptors({each.fd for each in (arena, of_samples) if each is not None} | {listening.fileno()})
        os.chdir("/")  # sources' paths are absolute
        asyncio.run(_serve(arena, of_samples, listening, share, settings))
    finally:
        os._exit(0)


def _release_other_descriptors(kept: set[int]) -> None:
    """Points all other descriptors at /dev/null.

    Inherited ones may be pipes, sockets and locks that others wait for. Their numbers stay taken, as inherited code may
    still write to them or close them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for each in {0, 1, 2, *(int(path.name) for path in Path("/proc/self/fd").iterdir())} - {null, *kept}:
        os.dup2(null, each, inheritable=each <= 2)


async def _serve(
    arena: Arena, of_samples: Arena | None, listening: socket.socket, share: str, settings: ReaderSettings
) -> None:
    reader = HostReader(arena, of_samples, listening, PrivateFolder(), name_of(share), settings)
    if settings.peers:
        reader.open_peers(settings.peers, share)
    try:
        await reader.ended.wait()
    finally:
        os._exit(0)


class HostReader:
    """Lets loaders in, and ends the process after the last one has left. ``settings``: the budgets in memory."""

    def __init__(
        self,
        arena: Arena,
        of_samples: Arena | None,
        listening: socket.socket,
        folder: PrivateFolder,
        name: str,
        settings: ReaderSettings,
    ) -> None:
        self.ended = asyncio.Event()
        self._loop = loop = asyncio.get_running_loop()
        self._arenas = [each for each in (arena, of_samples) if each is not None]
        self._listening, self._folder, self._name = listening, folder, name
        self._links: set[Link] = set()
        self._settings = settings
        self._memory = SharedTier(settings.memory_bytes) if settings.memory_bytes else None
        self._reads = reads = SharedReads(arena, loop.call_soon)
        self._prepared: PreparedSamples | None = None
        if of_samples is not None:
            self._prepared = PreparedSamples(settings.share_bytes, of_samples, loop.call_later, loop.time)
        self._pool = ReaderPool(reads.blocks, reads.done, behind=reads.behind, keeps=reads.may_keep)
        reads.pool = self._pool
        self._peers: PeerPool | None = None
        self._server: PeerServer | None = None
        listening.setblocking(False)
        loop.set_exception_handler(failed)
        loop.add_signal_handler(signal.SIGTERM, self._end)
        loop.add_reader(listening.fileno(), self._accept)
        self._timer = loop.call_later(LINGER_S, self._end_unless_used)

    def open_peers(self, peers: tuple[str, ...], share: str) -> None:
        """Joins this host's cache with those of ``peers`` (see ``checked_peers``), which are looked for after the
        return. If that fails, this host goes on alone, and its counts say why."""
        self._peers = self._reads.pool = pool = PeerPool(self._pool, self._reads.blocks, self._reads.done)
        try:
            listening, address = peer_discovery.listen(peers)
        except OSError as error:
            pool.stay_alone(f"this host does not listen for others: {error}")
            return
        memory = None
        if self._memory is not None:
            self._memory.owns, memory = pool.owns, self._memory.part()
        self._server = PeerServer(listening, self._reads.blocks, memory, self._client)
        self._meeting = self._loop.create_task(self._meet(pool, address, peers, share))

    async def _meet(self, pool: PeerPool, address: str, peers: tuple[str, ...], share: str) -> None:
        if peers[0] != peer_discovery.AUTO:
            await pool.meet(address, peers[1:])
            return
        try:
            pool.join(address, await asyncio.to_thread(peer_discovery.found_by_torchrun, address, share))
        except Exception as error:  # whatever the store says
            pool.stay_alone(f"other hosts were not found: {error}")

    def _peer_counts(self) -> dict[str, Any]:
        """Returns the counts of reads from other hosts, and of what was sent to them."""
        if self._peers is None:
            return {}
        served = {} if self._server is None else self._server.counts()
        return {"peers": self._peers.counts() | served}

    def _accept(self) -> None:
        """Accepts a connection; closes that of another user's process."""
        try:
            connection, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError:  # descriptors are short
            self._loop.remove_reader(self._listening.fileno())
            self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._listening.fileno(), self._accept)
            return
        if is_ours(connection):
            connection.setblocking(False)
            self._loop.add_reader(connection.fileno(), self._welcome, connection)
            self._linger(_FIRST_MESSAGE_S)
        else:
            connection.close()

    def _welcome(self, connection: socket.socket) -> None:
        """Reads a connection's first message, answers it, and makes the loader's link.

        Closes the connection if that is no message of a loader.
        """
        self._loop.remove_reader(connection.fileno())
        memory, files = self._memory, list[int]()
        try:
            said, files, _, _ = socket.recv_fds(connection, LARGEST, 1, socket.MSG_CMSG_CLOEXEC)
            settings = _settings_of(said)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            socket.send_fds(connection, [self._answer()], [each.fd for each in self._arenas])
            of_samples = socket.socket(fileno=files[0]) if files and self._prepared is not None else None
        except OSError:
            connection.close()
            for file in files:
                os.close(file)
            return
        part = None if memory is None else memory.part()
        link = Link(connection, settings, self._reads.blocks, part, self._client, lambda: self._leave(link))
        if of_samples is not None and self._prepared is not None:
            link.share(self._prepared, of_samples)
        else:
            for file in files:
                os.close(file)
        self._links.add(link)
        self._timer.cancel()

    def _answer(self) -> bytes:
        budget = 0 if self._memory is None else self._memory.budget
        of_samples = 0 if self._prepared is None else self._prepared.budget
        sizes = self._arenas[0].capacity, budget, self._arenas[-1].capacity, of_samples
        return pickle.dumps(Answer(os.getpid(), *sizes, self._settings.peers))

    def _client(self, service: Service) -> ClientPool:
        return self._reads.client(service, self._pool, self._peer_counts)

    def _leave(self, link: Link) -> None:
        """Removes the link of a loader that has left."""
        if link in self._links:
            self._links.remove(link)
            link.leave()
            self._reads.remove(link.pool)
            self._linger(LINGER_S)

    def _linger(self, seconds: float) -> None:
        """If no loader is connected, ends the process in so many seconds unless one connects by then."""
        self._timer.cancel()
        if not self._links:
            self._timer = self._loop.call_later(seconds, self._end_unless_used)

    def _end_unless_used(self) -> None:
        """Ends the process unless a loader is connecting.

        Loaders connect under the folder's lock, so none does so while the name is removed.
        """
        try:
            with self._folder.locked(0.0):
                if select.select([self._listening], [], [], 0.0)[0]:
                    self._linger(_FIRST_MESSAGE_S)
                else:
                    self._end()
        except TimeoutError:
            self._linger(_LOCK_S)

    def _end(self) -> None:
        self._folder.remove(self._name)
        self.ended.set()


def _settings_of(said: bytes) -> ReaderSettings:
    """Returns the settings in a loader's first message. Raises ConnectionError for anything else."""
    try:
        settings = pickle.loads(said)
    except Exception as error:
        raise ConnectionError(f"invalid message ({error})") from error
    if not isinstance(settings, ReaderSettings):
        raise ConnectionError("invalid message")
    return settings
