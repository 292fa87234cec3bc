"""Where files are read to, so that no byte lies in memory twice.

What the tier in memory keeps is read past the page cache, and what nothing keeps is only brought in there. Where the
page cache has the set already, files need no tier in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from minato_gpu.notices import say_once
from minato_gpu.sources.memory_tier import MemoryTier

LOOKED = 256  # files
_ENOUGH = 0.95  # of their bytes


class Where(Enum):
    """Where a file's bytes go."""

    PAGE_CACHE = "the page cache"
    BLOCK = "a block of shared memory, and the page cache as well"
    UNCACHED = "a block of shared memory, and the page cache stays as it was"


class Placing:
    """Decides for each file. ``expected``: of a read, by its number, what it is to the tier in memory (an item, see
    memory_tier.py), and about how many bytes; ``copies``: a tier on disk may want to have its bytes."""

    def __init__(self, memory: MemoryTier | None, expected: Callable[[int], tuple[int, int]], *, copies: bool) -> None:
        self._memory, self._expected = memory, expected
        self._passes = Where.BLOCK if copies else Where.PAGE_CACHE
        self._files = self._nbytes = self._cached = 0  # the first few hundred, and what the page cache had of them

    def where(self, number: int) -> Where:
        """For a read that begins."""
        memory = self._memory
        if memory is None:
            return self._passes
        if not memory.off_for_files and (why := self._why_off()):
            memory.off_for_files = why
            say_once(f"The cache in memory is {why}: they are read from there. What lies at URLs is kept as before.")
        if memory.off_for_files or not memory.may_keep(*self._expected(number)):
            return self._passes
        return Where.UNCACHED

    @property
    def is_open(self) -> bool:
        """Whether more files are to be looked at as they come to be read past the page cache."""
        return self._files < LOOKED

    def had(self, nbytes: int, cached: int | None) -> None:
        """A file has so many bytes, and the page cache had ``cached`` of them; None: the kernel does not tell, which
        settles it. Where several threads tell at a time one of them may be lost, which makes no difference."""
        if cached is None:
            self._files = LOOKED
            return
        self._files += 1
        self._nbytes += nbytes
        self._cached += min(cached, nbytes)

    def _why_off(self) -> str:
        """Why no file needs a tier in memory; empty where one does, or that is not known."""
        if self.is_open or self._nbytes == 0 or self._cached < _ENOUGH * self._nbytes:
            return ""
        share = self._cached / self._nbytes
        return f"off for files: the page cache had {share:.0%} of the first {self._files} of them already"
