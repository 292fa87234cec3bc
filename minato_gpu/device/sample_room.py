"""Reserves device memory for samples before they are made, and holds it in the budget for as long as they live.

While the size of a sample is unknown, each is reserved with one byte. Only as many samples are made together as there
is room for. Without room for any, one is made all the same, because the oldest undelivered sample may be among them; it
is copied into its host row before the next is made (P4). Under an elastic budget (no limit in bytes was given) a whole
micro-batch is made: a device is of no use for single samples.

A sample without room costs two copies, to the host and back for its batch. So an executor waits for room while the
consumer is not waiting for a batch.
"""

from __future__ import annotations

import weakref

from minato_gpu.device.loads import rows_bytes
from minato_gpu.device.transfers import Transfers
from minato_gpu.lanes.base import Task
from minato_gpu.lanes.store import Store


class SampleRoom:
    """Memory reservations of one executor; for the lane's thread."""

    def __init__(self, store: Store, transfers: Transfers) -> None:
        self.sample_bytes = 0  # bytes of one sample on the device; 0: unknown
        self.held = 0  # bytes reserved for samples that are not made yet
        self.over_budget = False  # the last reservation exceeded the budget
        self._store = store
        self.transfers = transfers

    def should_wait(self, task: Task, made: frozenset[str], count: int) -> bool:
        """Returns True when an executor should wait before making ``count`` samples: the consumer is not waiting, and
        there is no room for them, nor, if they are more, for half of what fits beside a batch.

        False while sizes are unknown or the budget has no limit.
        """
        transfers = self.transfers
        if transfers.consumer_waits:
            return False
        self._measure(task, made)
        limit = transfers.budget.limit
        if not (limit and self.sample_bytes and transfers.batch_bytes):
            return False
        most = max(1, (limit - transfers.batch_bytes) // (2 * self.sample_bytes))
        return not transfers.budget.has_room(self.sample_bytes * min(count, most))

    def reserve(self, task: Task, made: frozenset[str], count: int) -> int:
        """Reserves memory for up to ``count`` samples, for one at least (for all, if the budget is elastic); for just
        one while sizes are unknown and there is a limit. Returns how many may be made.

        ``made``: names of the fields that device implementations make.
        """
        self.over_budget = False
        budget = self.transfers.budget
        self._measure(task, made)
        if not (self.sample_bytes and self.transfers.batch_bytes):  # sizes are unknown
            if budget.limit is None:
                self.held = count  # a byte each, so that a batch short of memory waits for them
                budget.take("samples", self.held)
                return count
            self._take(self.sample_bytes)
            self.over_budget = True  # it may take the first batch's memory
            return 1
        least = count if budget.elastic else 1
        found = budget.take_some("samples", self.sample_bytes, count)
        if found < least:
            self.transfers.sweep()
            found += budget.take_some("samples", self.sample_bytes, count - found)
        if found < least:
            self.over_budget = True
            budget.take("samples", (least - found) * self.sample_bytes)
        count = max(least, found)
        self.held = count * self.sample_bytes
        return count

    def give_back(self) -> None:
        """Frees what is reserved for samples that were not made or do not stay on the device."""
        if self.held:
            self.transfers.budget.give("samples", self.held)
        self.held = 0

    def hand_on(self, owner: object, nbytes: int) -> None:
        """Moves ``nbytes`` of the reservation to ``owner``, whose garbage collection gives them back to the budget."""
        if nbytes > self.held:  # the first sample, whose size was unknown
            self._take(nbytes - self.held)
        self.held -= nbytes
        weakref.finalize(owner, self.transfers.budget.give, "samples", nbytes).atexit = False

    def _measure(self, task: Task, made: frozenset[str]) -> None:
        """Updates the sizes of samples and batches from the task's layout, where it has one."""
        rows = max((piece.rows for piece in task.pieces if piece.slab >= 0), default=0)
        if not task.layout or not rows:
            return
        layout = self._store.layout(task.layout)
        self.sample_bytes = sum(layout.leaves[number].nbytes for name, number in layout.by_name.items() if name in made)
        self.transfers.announce(rows_bytes(layout, max(rows, self.transfers.rows)))

    def _take(self, nbytes: int) -> None:
        """Reserves memory for one sample, whether it fits or not."""
        budget = self.transfers.budget
        if not budget.take_some("samples", nbytes, 1):
            self.over_budget = True
            budget.take("samples", nbytes)
        self.held += nbytes
