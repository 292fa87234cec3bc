"""The service of the reader process on a bench, with a pool and a disk that a test finishes by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minato_gpu.memory.arena import Arena
from minato_gpu.sources.blocks import ASKED, Blocks, copy, space_of
from minato_gpu.sources.memory_tier import MemoryTier
from minato_gpu.sources.service import Service
from minato_gpu.sources.source import Key, Source

PAGE, SIZE = 4096, 100


class ByHand:
    """Reads that are under way until the test says so."""

    def __init__(self) -> None:
        self.under_way: dict[int, Source] = {}
        self.cancelled: list[int] = []

    def submit(self, number: int, source: Source) -> None:
        assert all(other < number for other in self.under_way)
        self.under_way[number] = source

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


class Bench:
    """A service, its pool, and what it has told."""

    def __init__(self, limit: int = 10**6, memory: MemoryTier | None = None) -> None:
        self.told: dict[int, Any] = {}
        self.arena = Arena("test")
        self.blocks = Blocks(self.arena)
        self.service = Service(self.blocks, limit, self._tell, memory)
        self.pool = self.service.pool = ByHand()

    def _tell(self, told: Any) -> None:
        number, places = told
        assert number not in self.told
        self.told[number] = places

    def want(self, place: int, tickets: list[tuple[int, tuple[Key, ...]]]) -> None:
        """Tickets whose samples have their numbers."""
        self.service.want(place, [(number, number, keys) for number, keys in tickets])

    def finish(
        self, number: int, nbytes: int = SIZE, error: BaseException | None = None, version: bytes | None = None
    ) -> None:
        """The read of this number ends, with bytes that tell its source."""
        source, block = self.pool.under_way.pop(number), -1
        if error is None:
            block, view = self.blocks.allocate(nbytes)
            view[:] = content(source.path, nbytes)
        self.service.done(number, block, nbytes if error is None else 0, error, version=version)

    def got(self, ticket: int) -> list[bytes | None]:
        """What a worker would find; nothing of what it is asked for."""
        places = [place for place in self.told[ticket] if place[0] != ASKED]
        copies = [copy(self.arena, *place[:3]) for place in places]
        return [None if each is None else each.tobytes() for each in copies]


def content(path: str, nbytes: int) -> bytes:
    return (path.encode() * nbytes)[:nbytes]


def key(path: str, length: int | None = None) -> Key:
    return path, 0, length


class Written:
    """A tier on disk that writes when the test says so. ``takes``: whether it has room."""

    def __init__(self) -> None:
        self.following = self
        self.takes = True
        self.waiting: list[tuple[str, Callable[[], None]]] = []
        self.late: set[tuple[int, int]] = set()  # samples and epochs after which they are not wanted soon
        self.gone: list[str] = []

    def wanted(self, parts: int) -> None:
        pass

    def stays(self, sample: int, epoch: int) -> bool:
        return (sample, epoch) not in self.late

    def let_go(self, key: Key) -> None:
        self.gone.append(key[0])

    def write(self, key: Key, version: bytes, block: int, nbytes: int, written: Callable[[], None]) -> bool:
        assert version == b"1"
        if self.takes:
            self.waiting.append((key[0], written))
        return self.takes

    def finish(self) -> None:
        """What has waited longest is written."""
        self.waiting.pop(0)[1]()


class Kept(Bench):
    """A bench with a tier in memory for ``pages`` copies, and one on disk."""

    def __init__(self, pages: int, limit: int = 10**6, samples: int = 10) -> None:
        self.memory = MemoryTier(pages * PAGE, samples)
        super().__init__(limit, self.memory)
        self.disk = Written()
        self.service.disk = self.disk  # type: ignore[assignment]

    def wanted(self, place: int, ticket: int, sample: int, *paths: str) -> None:
        self.service.want(place, [(ticket, sample, tuple(key(path, SIZE) for path in paths))])

    @property
    def held(self) -> int:
        """Bytes of memory in use."""
        return self.arena.allocated

    def from_disk(self, number: int) -> None:
        """The read of this number ends with a copy that the disk had."""
        block, view = self.blocks.allocate(SIZE)
        view[:] = content(self.pool.under_way.pop(number).path, SIZE)
        self.service.done(number, block, SIZE, None, on_disk=True)

    def check(self) -> None:
        """Nobody wants anything: what is kept is what is held."""
        assert self.held == sum(space_of(copy.nbytes) for copy in self.memory._copies.values()) <= self.memory.budget
        assert self.service.counts()["bytes_ahead"] == 0
