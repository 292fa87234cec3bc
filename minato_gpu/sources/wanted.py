"""What the service of the reader process keeps of a ticket, and of a source's bytes while somebody wants them."""

from __future__ import annotations

from dataclasses import dataclass, field

from minato_gpu.sources.blocks import NOWHERE
from minato_gpu.sources.memory_tier import NO_ITEM, Copy
from minato_gpu.sources.source import Key


@dataclass(slots=True, eq=False)
class SourceBytes:
    """One source's bytes: to be read, being read, or there (``stamp``); ``users``: tickets that want them. ``sample``:
    of the first of these, wanted in ``epoch``."""

    key: Key
    number: int
    place: int
    sample: int = -1
    epoch: int = 0
    item: int = NO_ITEM
    at: int = 0  # of the access that it was read for
    users: int = 0
    block: int = NOWHERE
    nbytes: int = 0
    stamp: int = 0
    started: bool = False
    done: bool = False
    kept: bool = False  # by the tier in memory, whose its block is
    waiting: list[WantedTicket] = field(default_factory=list)

    def take(self, copy: Copy) -> bool:
        """They are those of a copy in memory."""
        self.block, self.nbytes, self.stamp = copy.block, copy.nbytes, copy.stamp
        self.done = self.kept = True
        return True


@dataclass(slots=True, eq=False)
class WantedTicket:
    """``bytes`` of its sources, in their order; of so many of them they are ``missing`` yet."""

    number: int
    place: int
    asked: int = -1  # the sample whose fields its worker is to send, if it is
    bytes: list[SourceBytes] = field(default_factory=list)
    missing: int = 0
