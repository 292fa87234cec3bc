"""From the sampler to tickets: one epoch's batches, how often each key has come, and what a save needs of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple
from zlib import crc32

import numpy as np

from minato_gpu.arguments import Arguments
from minato_gpu.lanes.base import NoSample
from minato_gpu.samples import Key, Position, Value, witness_of
from minato_gpu.sampling.delivered import DeliveredPositions
from minato_gpu.sampling.occurrences import Occurrences, occurrences_of
from minato_gpu.sampling.orders import REPLAY, Order, SamplerSnapshot
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.sampling.worker_streams import WorkerStreams
from minato_gpu.spans import Span


class Drawn(NamedTuple):
    """One batch of the sampler: ``positions`` in the epoch's order, keys and occurrences (None: all 0).

    ``left``: where an earlier run delivered some of it, the offsets of what it left, as half-open ranges.
    """

    positions: Sequence[Position]
    keys: list[Key]
    occurrences: list[int] | None
    left: tuple[Span, ...] | None = None


OFTEN = 16
"""Saves come often where no more batches than these are drawn between two of them."""

_PLAIN = {int, str, bool, float, np.int64, np.int32, NoSample}


class Mark(NamedTuple):
    """Where one batch begins in the sampler's order; ``state``: the sampler's own before it was drawn, where kept."""

    place: int
    position: int
    state: SamplerSnapshot | None
    keys: list[Key]

    @property
    def end(self) -> int:
        """The position after its last."""
        return self.position + len(self.keys)


def source_of(loader: Arguments, number: int, seed: int, order: Order) -> Source:
    """An epoch of this loader from its beginning."""
    return Source(number, seed, order, Sampling(loader), occurrences_of(loader))


class Source:
    """The batches of one epoch.

    ``place`` and ``position``: number and first position of the batch to draw next. ``delivered``: what the consumer
    has; an epoch that goes on where an earlier run left it begins with that run's. ``marks``: for a sampler that
    cannot be replayed, the batches that may still have to be delivered. ``lock``: over what a save looks at, which any
    thread may ask for while the consumer's goes on.

    Batches come in a multiple of as many as there are devices, where the last are dropped; those that are left over in
    the end are dropped too, unless an earlier run has delivered some of them.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        order: Order,
        sampling: Sampling,
        occurrences: Occurrences,
        *,
        place: int = 0,
        position: int = 0,
        delivered: DeliveredPositions | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.number = number
        self.seed = seed
        self.order = order
        self.occurrences = occurrences
        self.place = place
        self.position = position
        self.delivered = DeliveredPositions() if delivered is None else delivered
        self.marks: deque[Mark] = deque()
        self.digests = deque([(0, 0)] if sampling.draws_on else [])  # position, and digest of all keys before it
        self.expected: tuple[int, int] | None = None  # one of those, of an earlier run
        self.witness: int | None = None  # of the epoch's first keys
        self.streams: WorkerStreams | None = None  # of an iterable data set: its workers' own
        self._saved = place  # when a state was last asked for, or might have been: what came next then
        self._stores_keys = True  # as far as is known, keys that are drawn ahead can be part of a state
        self._before = DeliveredPositions(self.delivered.batches, self.delivered.low, self.delivered.above)
        self._batched = sampling.batched
        self._sampling = sampling
        self._told_epoch = sampling.told_epoch
        self._whole = sampling.size is None  # batches are delivered as they are, none in parts
        self._gone = place  # batches drawn that an earlier run has delivered whole
        self._multiple = sampling.multiple
        self.length = sampling.expected  # samples, as the sampler says
        self._behind: tuple[int, Occurrences] | None = None  # at an earlier place; kept while saves come often

    @property
    def told_epoch(self) -> int | None:
        """What ``set_epoch`` was last told before the order was drawn.

        A sampler whose batches are taken as they are is drawn at iter(); one that is cut here, at the first batch.
        """
        drawn = self._whole or self.place or self.order.coming
        return self._told_epoch if drawn else self._sampling.told_epoch

    def draw(self) -> Drawn | None:
        """The next batch, or None at the end. What the sampler raises passes through."""
        with self.lock:
            if not self._fill():
                self._check_end()
                return None
            state, item = self.order.coming[0]
            first = self.position
            try:
                keys = self.keys_of(item)
            except Exception:  # it is told once, and the order goes on behind it
                self.order.coming.popleft()
                raise
            if self.order.way != REPLAY:
                self._remember(Mark(self.place, first, state, keys))
                self._stores_keys = self._stores_keys and _PLAIN.issuperset(map(type, keys))
            occurrences = self._take(keys)
            left = None
            if self._before.above and first < self._before.top:
                left = tuple((lo - first, hi - first) for lo, hi in self._before.left_of(first, self.position))
                self._gone += not left
                if self._whole:
                    self._check_whole(left, len(keys))
            # of positions, as a cast would say, in one call more for every batch
            return Drawn(range(first, self.position), keys, occurrences, left)  # type: ignore[arg-type]

    def _take(self, keys: list[Key]) -> list[int] | None:
        """The next batch, of these keys, counts as drawn. Returns how often each has come before."""
        self.order.coming.popleft()
        if self.place == 0:
            self.witness = witness_of(keys)
        self.place, self.position = self.place + 1, self.position + len(keys)
        if self.digests:
            self._digest(keys)
        return None if self.occurrences.unique else self.occurrences.count(keys)

    def _fill(self) -> bool:
        """Let the rest of the round be at hand; nothing of it if it is not whole. Returns whether there is any."""
        if not self.place:
            self._told_epoch = self.told_epoch
        coming, rest = self.order.coming, self._multiple - self.place % self._multiple
        often = self.place - self._saved < OFTEN
        if self.order.fill(rest, keep=often or not self._stores_keys):
            return True
        kept, end = 0, self.position
        while kept < len(coming) and end < self._before.top:
            end += len(self.keys_of(coming[kept][1]))
            kept += 1
        while len(coming) > kept:
            coming.pop()
        return kept > 0

    def saved(self, marks: list[Mark]) -> Occurrences:
        """A state is made that begins with these marks, the last ones, or else now; there may be more of them soon.

        Returns how often each key had come by then. Those who save seldom pay for the whole window.
        """
        self._saved = self.place
        if self._stores_keys:  # nobody is likely to go further back than this; who does gets keys
            for at in range(len(self.marks) - len(marks) - 1, -1, -1):
                if self.marks[at].state is None:
                    break
                self.marks[at] = self.marks[at]._replace(state=None)
        place = marks[0].place if marks else self.place
        if self._behind is None or self._behind[0] > place:
            behind = self.occurrences.before([key for mark in marks for key in mark.keys])
        else:
            behind = self._behind[1]
            for mark in islice(self.marks, self._behind[0] - self.marks[0].place if self.marks else 0, None):
                if mark.place == place:
                    break
                behind.count(mark.keys)
        self._behind = place, behind
        return behind

    def keys_of(self, item: Value) -> list[Key]:
        """The keys of what the sampler yielded: one ticket each, and one for a batch without any."""
        return (list(item) or [NoSample()]) if self._batched else [item]

    def _check_end(self) -> None:
        """What an earlier run delivered must be there: an epoch that ends before it would never come to its end."""
        before = self._before
        if before.batches > self.place or before.top > self.position:
            raise ValueError(
                f"the state has {before.batches} batches delivered up to position {before.top}, but the sampler ends "
                f"after {self.place} at {self.position}; it is damaged, or belongs to another data set or sampler"
            )

    def _check_whole(self, left: tuple[Span, ...], rows: int) -> None:
        """Of what an earlier run delivered out of order every batch is whole, and they are as many as it counted."""
        before = self._before
        if left not in ((), ((0, rows),)) or (self.position >= before.top and self._gone != before.batches):
            raise ValueError(
                f"the state has {before.batches} batches delivered, and its positions are not those of so many; it is "
                "damaged, or belongs to another sampler"
            )

    def skip(self) -> None:
        """Draw again, and drop, the batches of which nothing is left. Raises ValueError if the order is too short.

        A state with the sampler's own or with the keys begins at the first batch that is not delivered whole.
        """
        while self.position < self.delivered.low:
            if not self.order.fill(1):
                raise ValueError(
                    f"the state has {self.delivered.low} samples delivered, but the sampler yields {self.position}; it "
                    "belongs to another data set or sampler"
                )
            try:
                keys = self.keys_of(self.order.coming[0][1])
            except Exception:  # an earlier run was told
                self.order.coming.popleft()
                continue
            if self.position + len(keys) > self.delivered.low:
                if self.place == 0:
                    self.witness = witness_of(keys)
                break
            if self.order.way != REPLAY:
                raise ValueError(f"state: {self.delivered.low} samples delivered, and its order begins long before")
            self._take(keys)
        self._gone = self.place
        if not self.delivered.above and (self.place, self.position) != (self.delivered.batches, self.delivered.low):
            raise ValueError(
                f"the state has {self.delivered.batches} batches of {self.delivered.low} samples delivered, and the "
                f"sampler's batch {self.place} begins at {self.position}; it is damaged, or belongs to another sampler"
            )

    def _digest(self, keys: list[Key]) -> None:
        """These keys were the last. Raises ValueError where an earlier run had others up to there."""
        self.digests.append((self.position, crc32(repr(keys).encode(), self.digests[-1][1])))
        if self.expected is not None and self.expected[0] == self.position and self.expected != self.digests[-1]:
            raise ValueError(
                f"the sampler's first {self.position} keys are not those that were delivered before it was saved. "
                "It draws while the epoch runs, so nobody else may draw from its generator then: give it one of its own"
            )
        while len(self.digests) > 1 and self.digests[1][0] <= self.delivered.floor:
            self.digests.popleft()

    def _remember(self, mark: Mark) -> None:
        marks = self.marks
        marks.append(mark)
        while len(marks) > 1 and marks[1].position <= self.delivered.floor:
            marks.popleft()
        if self._behind is not None and self._behind[0] < marks[0].place:
            self._behind = None
