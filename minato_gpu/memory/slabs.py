"""Slabs that a device reads: one is free again when its owner has dropped it and the last copy out of it is done."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from minato_gpu.memory.arena import Arena


class Slabs:
    """Blocks of ``arena`` by offset. Every method may be called by any thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._readers: Counter[int] = Counter()
        self._dropped: set[int] = set()
        self._lock = threading.Lock()

    def read(self, slabs: Iterable[int]) -> None:
        """Copies out of these have been asked for."""
        with self._lock:
            self._readers.update(slabs)

    def done(self, slabs: Iterable[int]) -> None:
        """Those copies are through."""
        with self._lock:
            for slab in slabs:
                self._readers[slab] -= 1
                if not self._readers[slab]:
                    del self._readers[slab]
                    if slab in self._dropped:
                        self._dropped.remove(slab)
                        self._arena.free(slab)

    def drop(self, slab: int) -> None:
        """Nobody writes or asks for it any more."""
        with self._lock:
            if slab in self._readers:
                self._dropped.add(slab)
            else:
                self._arena.free(slab)
