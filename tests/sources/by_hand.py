"""The service of the reader process on a bench: with a pool that a test finishes by hand."""

from __future__ import annotations

from typing import Any

from minato_gpu.memory.arena import Arena
from minato_gpu.sources.blocks import ASKED, Blocks, copy
from minato_gpu.sources.memory_tier import MemoryTier
from minato_gpu.sources.service import Service
from minato_gpu.sources.source import Key, Source

SIZE = 100


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
        self.service.done(number, block, nbytes if error is None else 0, error, 0.01, version=version)

    def got(self, ticket: int) -> list[bytes | None]:
        """What a worker would find; nothing of what it is asked for."""
        places = [place for place in self.told[ticket] if place[0] != ASKED]
        copies = [copy(self.arena, *place[:3]) for place in places]
        return [None if each is None else each.tobytes() for each in copies]


def content(path: str, nbytes: int) -> bytes:
    return (path.encode() * nbytes)[:nbytes]


def key(path: str, length: int | None = None) -> Key:
    return path, 0, length
