"""Whether a tier on disk follows the orders of epochs to come, and what stays there then. No file and no clock.

It does where that has more hits than keeping what came first: where those who share the directory read a part of each
epoch, know which, and read nothing twice (caching/soon.py). Several ranks on one directory are one reader: what stays
is what any of them reads again soon. They see each other's ``Part`` in the index; as soon as somebody is there who
reads something else, or does not say what, nothing goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from minato_gpu.caching.choice import choose, reach
from minato_gpu.caching.orders import Orders, Part, RankOrders
from minato_gpu.caching.soon import Soon
from minato_gpu.sources.disk.records import Room, allotted
from minato_gpu.sources.memory_tier import Begun
from minato_gpu.sources.source import Key

_KNOWN = (16, 128, 1024)  # sources that have been read: it is looked again how many there is room for
_BLOCK = 4096  # bytes of disk are given out in such pieces
_SHARED = 0.02  # of the sources: so many may have been another sample's, too
_SOME = 8  # such sources that there may be of few


May = Callable[[Sequence[Part | None]], bool]


class Following:
    """Of a data set of ``samples`` samples; ``memory_bytes``: what a tier in memory keeps besides, of the same.

    ``why``: a sentence on what stays. ``part``: what this run reads in its epoch, for others to see. ``may`` tells, of
    what other runs read, whether what is not to stay may go; any thread may call it.
    """

    def __init__(self, samples: int, memory_bytes: int = 0) -> None:
        self.why = "minio: the first epoch has not begun"
        self.part: Part | None = None
        self.may: May = _nothing_goes
        self._samples, self._memory = samples, memory_bytes
        self._parts = 1  # sources of a sample
        self._sizes = 0  # of sources that have been read
        self._nbytes = 0  # of disk that these take
        self._soon = Soon(samples)
        self._begun: Begun | None = None
        self._beside: list[Part | None] = []
        self._room = Room(0, 0, 0)
        self._is_on = False
        self._never = ""  # why not, for good
        self._owners = _Owners(samples)

    def begin(self, begun: Begun, beside: Sequence[Part | None], room: Room) -> None:
        """An epoch begins. ``beside``: what the other runs that use the directory read, None for one that does not say;
        ``room``: of the directory."""
        orders = begun.orders
        self.part = orders.part(begun.epoch) if isinstance(orders, RankOrders) else None
        self._begun, self._beside, self._room = begun, [*beside], room
        self._decide()

    def wanted(self, sample: int, keys: Sequence[Key]) -> None:
        """The sample is going to be read, from these sources."""
        self._parts = len(keys) or 1
        if self._is_on and 0 <= sample < self._samples and not self._owners.note(sample, keys):
            self.stop("samples have sources in common")

    def read(self, nbytes: int) -> None:
        """A source has been read, from disk or where it lies."""
        self._sizes += 1
        self._nbytes += allotted(nbytes, _BLOCK)
        if self._sizes in _KNOWN:
            self._decide()

    def stop(self, why: str) -> None:
        """Keep what came first from now on."""
        self._never = self.why = f"minio: {why}"
        self._is_on, self.may = False, _nothing_goes

    def stays(self, sample: int, epoch: int) -> bool:
        """Whether a copy of a source of this sample, which was wanted in that epoch, is to be on disk after that."""
        return not self._is_on or self._soon.after(epoch, sample)

    def _decide(self) -> None:
        """What stays, from what is known by now."""
        begun = self._begun
        if begun is None or self._never:
            return
        self._is_on, self.may = False, _nothing_goes
        ranks, share = _ranks(self.part, self._beside), self._share()
        if ranks is None:
            self.why = "minio: another run uses the directory"
        elif not begun.once:
            self.why = "minio: keys may come twice in an epoch, so what came first stays"
        elif share is None:
            self.why = "minio: it is not known yet how much there is room for"
        else:
            self._choose(begun, ranks, share)

    def _choose(self, begun: Begun, ranks: frozenset[int], share: float) -> None:
        orders: Orders | None = begun.orders
        shards = begun.shards / max(len(ranks), 1)
        choice = choose(shards=shards, share=share, known=orders is not None, alike=True, once=True)
        self.why = choice.why
        if choice.policy != "next-use" or orders is None:
            return
        if isinstance(orders, RankOrders):
            orders = orders.beside(ranks)
        epochs = reach(shards, share)
        self._is_on = self._soon.begin(begun.epoch, orders, epochs)
        if not self._is_on:
            self.why = "minio: the order of epochs to come is not known, so what came first is as good"
            return
        self.may = partial(_may_only, self.part, ranks)
        who = f"ranks {', '.join(map(str, sorted(ranks)))} read" if len(ranks) > 1 else "this host reads"
        self.why = f"next-use: what {who} again within {epochs:.2f} epochs stays, by the orders of epochs to come"

    def _share(self) -> float | None:
        """What there is room for, of the bytes of the whole set; None where their size is not known."""
        nbytes, sizes = self._nbytes, self._sizes
        if sizes < min(_KNOWN[1], self._room.copies):
            nbytes, sizes = self._room.taken, self._room.copies
        if not nbytes:
            return None
        return (self._room.nbytes + self._memory) / (nbytes / sizes * self._samples * self._parts)


def _ranks(mine: Part | None, beside: Sequence[Part | None]) -> frozenset[int] | None:
    """The ranks that read side by side, where all those are of one job, at most an epoch apart; else None. Empty where
    there is but one reader, who is of no job."""
    if not beside:
        return frozenset() if mine is None else frozenset([mine.rank])
    ranks = []
    for part in (mine, *beside):
        if mine is None or part is None or part.job != mine.job or abs(part.epoch - mine.epoch) > 1:
            return None
        ranks.append(part.rank)
    return frozenset(ranks)


def _may_only(mine: Part | None, ranks: frozenset[int], beside: Sequence[Part | None]) -> bool:
    """Whether no others than these ranks read side by side: else no copy may go."""
    found = _ranks(mine, beside)
    return found is not None and found <= ranks


def _nothing_goes(beside: Sequence[Part | None]) -> bool:
    return False


class _Owners:
    """Whether samples have sources of their own: what one of them will not need, another may.

    The samples of sources are noted in a table, each at a place that follows from the source's key; there may be
    another's. So not all that are shared are noticed, but soon some of many.
    """

    def __init__(self, samples: int) -> None:
        self._keys = np.zeros(2 * samples + 1, np.int64)
        self._samples = np.zeros(2 * samples + 1, np.int64)
        self._noted = self._shared = 0

    def note(self, sample: int, keys: Sequence[Key]) -> bool:
        """The sample has these sources. False once too many had been another's."""
        for key in keys:
            name = hash(key)
            at = name % len(self._keys)
            self._shared += self._keys.item(at) == name and self._samples.item(at) != sample
            self._keys[at], self._samples[at] = name, sample
            self._noted += 1
        return self._shared <= max(_SHARED * self._noted, _SOME)
