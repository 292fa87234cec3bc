"""Where files are read to, so that no byte lies in memory twice; pure.

What the tier in memory keeps is read past the page cache, and what nothing keeps is only brought in there. Where the
page cache has the set already, files need no tier in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

LOOKED = 256  # files
_ENOUGH = 0.95  # of their bytes


class Where(Enum):
    """Where a file's bytes go."""

    PAGE_CACHE = "the page cache"
    BLOCK = "a block of shared memory, and the page cache as well"
    UNCACHED = "a block of shared memory, and the page cache stays as it was"


class Cached:
    """What the page cache had of files as they were to be read, added up; of the first few hundred. Where several
    threads add at a time one of them may be lost, which makes no difference."""

    def __init__(self) -> None:
        self.files = self.nbytes = self.cached = 0

    @property
    def is_wanted(self) -> bool:
        """Whether more files are to be looked at."""
        return self.files < LOOKED

    def add(self, nbytes: int, cached: int | None) -> None:
        """A file has so many bytes, and the page cache ``cached`` of them; None: the kernel does not tell, which
        settles it."""
        if cached is None:
            self.files = LOOKED
            return
        self.files += 1
        self.nbytes += nbytes
        self.cached += min(cached, nbytes)

    def why_off(self) -> str:
        """Why no file needs a tier in memory; empty where one does, or that is not known."""
        if self.is_wanted or self.nbytes == 0 or self.cached < _ENOUGH * self.nbytes:
            return ""
        share = self.cached / self.nbytes
        return f"off for files: the page cache had {share:.0%} of the first {self.files} of them already"


class Tier(Protocol):
    """The tier in memory, see memory_tier.py."""

    off_for_files: str

    def may_keep(self, item: int, nbytes: int) -> bool:
        """Whether such an item may stay, if it is read now."""


class Placing:
    """Decides for each file. ``copies``: a tier on disk may want to have its bytes. ``say`` is told, once, that files
    are not kept in memory, and why."""

    def __init__(self, memory: Tier | None, *, copies: bool, cached: Cached, say: Callable[[str], None]) -> None:
        self._memory, self._copies, self._cached, self._say = memory, copies, cached, say

    def where(self, item: int, nbytes: int) -> Where:
        """For a part of a sample (an item, see memory_tier.py) with about so many bytes."""
        memory = self._memory
        if memory is not None:
            if not memory.off_for_files and (why := self._cached.why_off()):
                memory.off_for_files = why
                self._say(why)
            if not memory.off_for_files and memory.may_keep(item, nbytes):
                return Where.UNCACHED
        return Where.BLOCK if self._copies else Where.PAGE_CACHE
