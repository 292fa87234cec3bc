"""Keeps the memory of runs that were broken off until no worker is at their chunks any more."""

from __future__ import annotations

from minato_gpu.memory.completions import Completions

Chunks = set[tuple[int, int]]
"""(run, number) of chunks."""


class AbandonedRuns:
    """Memory of earlier runs, freed once their last chunk has ended: until then workers may write to it."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._held: list[tuple[Chunks, list[int], list[object]]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, chunks: Chunks, marks: list[int], memory: list[object]) -> None:
        """Keeps the memory of a run that was broken off while lanes were at these chunks.

        Marks are given back, and ``memory`` is dropped, when the last of the chunks has ended.
        """
        self._held.append((chunks, marks, memory))
        self._sweep()

    def through(self, run: int, chunk: int) -> None:
        """Notes that nobody is at this chunk any more."""
        for chunks, *_ in self._held:
            chunks.discard((run, chunk))
        self._sweep()

    def _sweep(self) -> None:
        for block in (block for chunks, marks, _ in self._held if not chunks for block in marks):
            self._completions.give_back(block)
        self._held = [entry for entry in self._held if entry[0]]
