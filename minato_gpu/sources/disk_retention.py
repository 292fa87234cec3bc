"""Decides whether a cache on disk follows the orders of epochs to come, and what it keeps then. No file and no clock.

It does where that has more hits than keeping what came first: where one run has the directory alone, reads a part of
each epoch, knows which, and reads nothing twice (caching/soon.py). With several runs or ranks on one directory it is
off. A source that several samples have in common may go with the first of them: that is a miss for the next.
"""

from __future__ import annotations

from minato_gpu.caching.choice import choose, reach
from minato_gpu.caching.soon import Soon
from minato_gpu.sources.disk.entry import disk_space_of
from minato_gpu.sources.disk.tier import Room
from minato_gpu.sources.memory_tier import Begun

_KNOWN = (16, 128, 1024)  # sources that have been read: it is looked again how many there is room for


class DiskRetention:
    """Decides what a cache on disk keeps of a data set of ``samples`` samples. ``why``: a sentence on what stays."""

    def __init__(self, samples: int) -> None:
        self.why = "minio: the first epoch has not begun"
        self._samples = samples
        self._parts = 1  # sources of a sample
        self._sizes = 0  # sources that have been read
        self._nbytes = 0  # bytes of disk that these take
        self._soon = Soon(samples)
        self._begun: Begun | None = None
        self._alone = False
        self._room = Room(0, 0, 0)
        self._is_on = False

    def begin(self, begun: Begun, alone: bool, room: Room) -> None:
        """Begins an epoch. ``alone``: no other run uses the directory; ``room``: what there is room for in it."""
        self._begun, self._alone, self._room = begun, alone, room
        self._decide()

    def wanted(self, parts: int) -> None:
        """Notes that a sample is going to be read, from ``parts`` sources (0 counts as 1)."""
        self._parts = parts or 1

    def read(self, nbytes: int) -> None:
        """Notes that a source of so many bytes has been read, from disk or storage."""
        self._sizes += 1
        self._nbytes += disk_space_of(nbytes)
        if self._sizes in _KNOWN:
            self._decide()

    def stays(self, sample: int, epoch: int) -> bool:
        """Returns whether a copy of a source of this sample is to stay on disk after it has been used in ``epoch``.

        True for all while orders are not followed.
        """
        return not self._is_on or self._soon.after(epoch, sample)

    def _decide(self) -> None:
        """Decides what stays, from what is known by now."""
        begun = self._begun
        if begun is None:
            return
        self._is_on, share = False, self._share()
        if not self._alone:
            self.why = "minio: another run uses the directory"
        elif not begun.once:
            self.why = "minio: keys may come twice in an epoch, so what came first stays"
        elif share is None:
            self.why = "minio: it is not known yet how much there is room for"
        else:
            self._choose(begun, share)

    def _choose(self, begun: Begun, share: float) -> None:
        orders = begun.orders
        choice = choose(shards=begun.shards, share=share, known=orders is not None, once=True)
        self.why = choice.why
        if choice.policy != "next-use" or orders is None:
            return
        epochs = reach(begun.shards, share)
        self._is_on = self._soon.begin(begun.epoch, orders, epochs)
        if self._is_on:
            soon = f"what this host reads again within {epochs:.2f} epochs"
            self.why = f"next-use: {soon} stays, by the orders of epochs to come"
        else:
            self.why = "minio: the order of epochs to come is not known, so what came first is as good"

    def _share(self) -> float | None:
        """Returns the share of the whole set's bytes that there is room for; None if their size is not known."""
        nbytes, sizes = self._nbytes, self._sizes
        if sizes < min(_KNOWN[1], self._room.copies):
            nbytes, sizes = self._room.taken, self._room.copies
        if not nbytes:
            return None
        return self._room.nbytes / (nbytes / sizes * self._samples * self._parts)
