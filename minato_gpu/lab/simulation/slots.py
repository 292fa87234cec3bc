"""What the slots of a simulated lane are at."""

from __future__ import annotations

from collections import deque

from minato_gpu.scheduling import messages as m


class VirtualSlots:
    """Chunks that wait for one of its free slots, in their order."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.free = 0
        self.queue: deque[m.Chunk] = deque()


class ChunkRun:
    """A chunk on its slot: ``ends`` are the times at which its samples become ready, ``told`` how many were told."""

    __slots__ = ("_serials", "begin", "chunk", "ends", "told", "version")

    def __init__(self, chunk: m.Chunk, begin: float, ends: list[float]) -> None:
        self.chunk = chunk
        self.begin = begin
        self.ends = ends
        self.told = 0
        self.version = 0
        self._serials = [serial for lo, hi in chunk.spans for serial in range(lo, hi)]

    def done(self, now: float) -> int:
        """How many samples are ready by now."""
        return sum(end <= now for end in self.ends)

    def newly(self, done: int) -> tuple[list[int], float]:
        """The samples that are told with this report, and the seconds that they took."""
        since = self.ends[self.told - 1] if self.told else self.begin
        serials, seconds = self.serials()[self.told : done], self.ends[done - 1] - since
        self.told = done
        return serials, seconds

    def slow_down(self, now: float, times: float) -> None:
        """What is left of it takes so many times as long."""
        self.ends = [end if end <= now else now + times * (end - now) for end in self.ends]
        self.version += 1

    def serials(self) -> list[int]:
        """Of its samples, but for those that were taken back."""
        return self._serials[: len(self.ends)]

    def ends_within(self, first: int, stop: int) -> list[float]:
        """When those of its samples become ready that lie there and were not told."""
        if all(hi <= first or lo >= stop for lo, hi in self.chunk.spans):
            return []
        untold = zip(self._serials[self.told :], self.ends[self.told :], strict=False)
        return [end for serial, end in untold if first <= serial < stop]
