"""Room on the device for samples: in the budget's account before they are made, and for as long as they stay.

They count with a byte each while their size is unknown, and only as many are made together as there is room for. Where
there is none, one is made all the same: the oldest undelivered sample may be among them. That one is brought into its
row before the next is made, and travels like those of the CPU lane (P4). Where no bytes were named, so is a whole
micro-batch: a device is no use for single samples.

What has no room costs two copies of each sample, to the host and back for its batch. So while the consumer waits for
no batch, an executor waits until it has taken one.
"""

from __future__ import annotations

import weakref

from minato_gpu.device.loads import rows_bytes
from minato_gpu.device.transfers import Transfers
from minato_gpu.lanes.base import Task
from minato_gpu.lanes.store import Store


class SampleRoom:
    """Of one executor, for its thread. ``each``: bytes of a sample on the device, 0 while they are not known; ``held``:
    bytes taken for samples that are not made yet; ``beyond``: although there was no room."""

    def __init__(self, store: Store, transfers: Transfers) -> None:
        self.each = 0
        self.held = 0
        self.beyond = False
        self._store = store
        self._transfers = transfers

    def lacks(self, task: Task, made: frozenset[str], count: int) -> bool:
        """Whether of ``count`` samples some would have to go to the host, or of as many as the device can hold beside
        its batches, though nobody waits for them: the consumer waits for no batch."""
        transfers = self._transfers
        if transfers.consumer_waits:
            return False
        self._measure(task, made)
        limit = transfers.budget.limit
        if not (limit and self.each and transfers.batch_bytes):
            return False
        most = max(1, (limit - transfers.batch_bytes) // (2 * self.each))
        return not transfers.budget.has_room(self.each * min(count, most))

    def wait(self) -> None:
        """Wait until there may be room, a moment at most."""
        self._transfers.await_room()

    def reserve(self, task: Task, made: frozenset[str], count: int) -> int:
        """Take room for as many of ``count`` samples as there is room for, at least for one; how many.

        ``made``: names of the fields that device implementations make.
        """
        self.beyond = False
        budget = self._transfers.budget
        self._measure(task, made)
        if not (self.each and self._transfers.batch_bytes):  # nobody knows yet what there is room for
            if budget.limit is None:
                self.held = count  # a byte each: a batch that finds no memory waits for them
                budget.take("samples", self.held)
                return count
            self._take(self.each)
            self.beyond = True  # it may be in the way of the first batch
            return 1
        least = count if budget.elastic else 1
        found = budget.take_some("samples", self.each, count)
        if found < least:
            self._transfers.sweep()
            found += budget.take_some("samples", self.each, count - found)
        self.held = found * self.each
        if found < least:
            self.beyond = True
            budget.take("samples", (least - found) * self.each)
            self.held = least * self.each
        return max(least, found)

    def give_back(self) -> None:
        """What was taken for samples that do not stay, or were not even begun, is free again."""
        if self.held:
            self._transfers.budget.give("samples", self.held)
        self.held = 0

    def hand_on(self, owner: object, nbytes: int) -> None:
        """So many bytes of what was taken are in the account for as long as ``owner`` lives."""
        if nbytes > self.held:  # the first sample: nobody knew
            self._take(nbytes - self.held)
        self.held -= nbytes
        weakref.finalize(owner, self._transfers.budget.give, "samples", nbytes).atexit = False

    def _measure(self, task: Task, made: frozenset[str]) -> None:
        """How large samples and batches are, where the task can tell."""
        rows = max((piece.rows for piece in task.pieces if piece.slab >= 0), default=0)
        if not task.layout or not rows:
            return
        layout = self._store.layout(task.layout)
        self.each = sum(layout.leaves[number].nbytes for name, number in layout.by_name.items() if name in made)
        self._transfers.announce(rows_bytes(layout, max(rows, self._transfers.rows)))

    def _take(self, nbytes: int) -> None:
        """Take what one sample needs, whether it fits or not."""
        budget = self._transfers.budget
        if not budget.take_some("samples", nbytes, 1):
            self.beyond = True
            budget.take("samples", nbytes)
        self.held += nbytes
