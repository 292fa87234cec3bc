"""Memory of runs that were broken off, while workers are still at chunks of theirs."""

from __future__ import annotations

from minato_gpu.window.host_memory import Block, HostMemoryAccount

Chunks = set[tuple[int, int]]
"""(run, number) of chunks."""


class AbandonedRuns:
    """What earlier runs held is freed once their last chunk is through: until then workers may write to it."""

    def __init__(self, holdings: HostMemoryAccount) -> None:
        self._holdings = holdings
        self._held: list[tuple[Chunks, list[Block], list[object]]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, chunks: Chunks, blocks: list[Block], slabs: list[object]) -> None:
        """A run was broken off while lanes were at these chunks. ``slabs``: free when nobody refers to them."""
        self._held.append((chunks, blocks, slabs))
        self._sweep()

    def through(self, run: int, chunk: int) -> None:
        """Nobody is at this chunk any more."""
        for chunks, *_ in self._held:
            chunks.discard((run, chunk))
        self._sweep()

    def laid_down_by(self, owner: int) -> list[tuple[int, int]]:
        """(offset, bytes) of what is held in the arena of this worker."""
        return [(at, nbytes) for _, blocks, _ in self._held for who, at, nbytes in blocks if who == owner]

    def _sweep(self) -> None:
        for _, blocks, _ in (entry for entry in self._held if not entry[0]):
            self._holdings.free(blocks)
        self._held = [entry for entry in self._held if entry[0]]
