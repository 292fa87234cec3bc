"""The batches of one epoch: keys, positions and occurrences, and those that a save needs once more."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from minato_gpu.arguments import Arguments
from minato_gpu.samples import Key, Position, witness_of
from minato_gpu.sampling.delivered_positions import DeliveredPositions
from minato_gpu.sampling.occurrences import Occurrences, occurrences_of
from minato_gpu.sampling.order import REPLAY, Order
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.sampling.worker_streams import WorkerStreams
from minato_gpu.scheduling.spans import Span


class Drawn(NamedTuple):
    """One batch drawn from the sampler."""

    positions: Sequence[Position]  # in the epoch's order
    keys: list[Key]
    occurrences: list[int] | None  # how often each key has come before; None: all 0
    # where an earlier run delivered some of it, the offsets of what it left, as half-open ranges
    left: tuple[Span, ...] | None = None


class KeptBatch(NamedTuple):
    """A drawn batch of an order that cannot be replayed, for saves."""

    place: int  # its number in the order
    position: int  # position of its first key
    keys: list[Key]
    occurrences: list[int] | None  # how often each key has come before; None: all 0


_position = attrgetter("position")


class EpochBatches:
    """The batches of one epoch of a loader, from its beginning or from where an earlier run left it.

    With ``drop_last`` and several devices the number of batches is a multiple of the devices' number: what is left over
    in the end is dropped, unless an earlier run has delivered some of it.
    """

    def __init__(
        self,
        loader: Arguments,
        number: int,
        seed: int,
        order: Order,
        *,
        place: int = 0,
        position: int = 0,
        delivered: DeliveredPositions | None = None,
    ) -> None:
        """``number``, ``seed``: the epoch's number and base seed. ``place``, ``position``: number and first position of
        the order's first batch. ``delivered``: what an earlier run has delivered of the epoch; None: nothing."""
        sampling = Sampling(loader)
        # held while a state is made, which any thread may ask for, and while a batch is drawn or delivered
        self.lock = threading.RLock()
        self.number = number
        self.seed = seed
        self.order = order
        self.occurrences: Occurrences = occurrences_of(loader)
        # occurrences of the next batches, where an earlier run has counted them
        self.counted: deque[list[int] | None] = deque()
        # number and first position of the batch to draw next
        self.place = place
        self.position = position
        self.delivered = delivered or DeliveredPositions()
        # of an order that cannot be replayed: drawn batches that are not delivered, or may be taken back; oldest first
        self.kept: deque[KeptBatch] = deque()
        self.witness: int | None = None  # hash of the epoch's first keys
        self.streams: WorkerStreams | None = None  # streams of an iterable data set
        self.length = sampling.expected  # samples, as the sampler says
        self._before = DeliveredPositions(self.delivered.batches, self.delivered.low, self.delivered.above)
        self._sampling = sampling
        self._cut = sampling.size is not None and sampling.batched  # lists that are nobody else's
        self._sampler_epoch = sampling.sampler_epoch
        self._gone = place  # batches drawn that an earlier run has delivered whole

    @property
    def sampler_epoch(self) -> int | None:
        """The epoch given to ``set_epoch`` before the order was drawn; None if the sampler does not report it.

        A sampler whose batches are taken as they are is drawn at ``iter()``; one whose keys are cut here, at the first
        batch.
        """
        drawn = self._sampling.size is None or self.place or self.order.coming
        return self._sampler_epoch if drawn else self._sampling.sampler_epoch

    def draw(self) -> Drawn | None:
        """Returns the next batch, or None at the end. What the sampler raises passes through.

        Raises TypeError for what is no batch, ValueError if the order does not fit what an earlier run delivered of it.
        """
        with self.lock:
            if not self._fill():
                self._check_end()
                return None
            first = self.position
            keys, occurrences = self._take()
            left = None
            if self._before.above and first < self._before.top:
                left = tuple((lo - first, hi - first) for lo, hi in self._before.left_of(first, self.position))
                self._gone += not left
                if self._sampling.size is None:
                    self._check_whole(left, len(keys))
            # of positions, as a cast would say, in one call more for every batch
            return Drawn(range(first, self.position), keys, occurrences, left)  # type: ignore[arg-type]

    def _take(self) -> tuple[list[Key], list[int] | None]:
        """Takes the next batch. Returns its keys, and how often each has come before.

        Raises TypeError for what is no batch; the order then goes on after it.
        """
        item = self.order.coming.popleft()
        keys = item if self._cut else self._sampling.keys_of(item)
        if self.counted:
            occurrences = self.counted.popleft()
        else:
            occurrences = None if self.occurrences.unique else self.occurrences.count(keys)
        if self.order.way != REPLAY:
            self._keep(KeptBatch(self.place, self.position, keys, occurrences))
        if self.place == 0:
            self.witness = witness_of(keys)
        self.place, self.position = self.place + 1, self.position + len(keys)
        return keys, occurrences

    def _fill(self) -> bool:
        """Draws the rest of the round, one batch for each device; drops it if it is not whole.

        Returns whether there is a batch to take.
        """
        if not self.place:
            self._sampler_epoch = self.sampler_epoch
        coming, multiple = self.order.coming, self._sampling.multiple
        if self.order.fill(multiple - self.place % multiple):
            return True
        kept, end = 0, self.position
        while kept < len(coming) and end < self._before.top:
            end += len(self._sampling.keys_of(coming[kept]))
            kept += 1
        while len(coming) > kept:
            coming.pop()
        return kept > 0

    def _keep(self, batch: KeptBatch) -> None:
        """Keeps a batch for saves, and no longer those that none can ask for."""
        kept, floor = self.kept, self.delivered.floor
        kept.append(batch)
        while len(kept) > 1 and kept[1].position <= floor:
            kept.popleft()

    def since(self, position: int) -> list[KeptBatch]:
        """Returns the drawn batches from the one that holds this position on; [] for the position of the next batch to
        draw. Only for an order that cannot be replayed."""
        if position == self.position:
            return []
        first = bisect_right(self.kept, position, key=_position) - 1
        return list(islice(self.kept, max(0, first), None))

    # --- after a resume ---------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Draws again, and drops, the batches that have been delivered whole.

        Raises ValueError if the order is too short, or its batches are not those that were delivered.
        """
        while self.position < self.delivered.low:
            if not self.order.fill(1):
                raise ValueError(
                    f"the state has {self.delivered.low} samples delivered, but the sampler yields {self.position}; it "
                    "belongs to another data set or sampler"
                )
            try:
                keys = self._sampling.keys_of(self.order.coming[0])
            except Exception:  # an earlier run has raised it
                self.order.coming.popleft()
                continue
            if self.position + len(keys) > self.delivered.low:
                if self.place == 0:
                    self.witness = witness_of(keys)
                break
            self._take()
        self._gone = self.place
        if not self.delivered.above and (self.place, self.position) != (self.delivered.batches, self.delivered.low):
            raise ValueError(
                f"the state has {self.delivered.batches} batches of {self.delivered.low} samples delivered, and the "
                f"sampler's batch {self.place} begins at {self.position}; it is damaged, or belongs to another sampler"
            )

    def _check_end(self) -> None:
        """Raises ValueError if the order ends before what an earlier run delivered: such an epoch would never end."""
        before = self._before
        if before.batches > self.place or before.top > self.position:
            raise ValueError(
                f"the state has {before.batches} batches delivered up to position {before.top}, but the sampler ends "
                f"after {self.place} at {self.position}; it is damaged, or belongs to another data set or sampler"
            )

    def _check_whole(self, left: tuple[Span, ...], rows: int) -> None:
        """Raises ValueError unless what an earlier run delivered out of order is as many whole batches as it
        counted."""
        before = self._before
        if left not in ((), ((0, rows),)) or (self.position >= before.top and self._gone != before.batches):
            raise ValueError(
                f"the state has {before.batches} batches delivered, and its positions are not those of so many; it is "
                "damaged, or belongs to another sampler"
            )
