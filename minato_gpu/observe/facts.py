"""What happens in a loader's epochs, as small records, and the stream in which they are told.

Rooms tell the log of an epoch (telemetry.py), which counts, and passes on what it was told to whoever has subscribed:
a trace, ranges for a profiler. Where nobody has, no record is made. Times are seconds of the monotonic clock
(``time.perf_counter``). Positions are places in the sampler's order; of streams, which have none, they count batches.

Hearers are called by the thread that tells, in the training process, perhaps with the engine's lock held: they note
what they hear and return. One that raises is heard of once, in a warning, and hears nothing more: it must not end a
training run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from minato_gpu.notices import LOGGER
from minato_gpu.spans import Span


class EpochBegan(NamedTuple):
    """An epoch begins. ``samples``: how many it will have (None: nobody knows); ``lanes``: slots by name."""

    epoch: int
    at: float
    samples: int | None
    lanes: dict[str, int]


class Drew(NamedTuple):
    """The sampler has yielded the samples at these positions."""

    epoch: int
    at: float
    positions: Span


class BytesFetched(NamedTuple):
    """The loader knows that the bytes of these samples, which were read ahead, are there."""

    epoch: int
    at: float
    positions: Sequence[int]


class BatchAsked(NamedTuple):
    """The training loop asks for its next batch. The answer, BatchDelivered, Failed or EpochEnded, is on its thread, too."""

    epoch: int
    at: float


class Worked(NamedTuple):
    """Slot ``worker`` of a lane has worked on so many ``samples``, at these positions, from ``begin`` to ``end``.

    ``sent``: when they were given to the lane. ``ends``: of each sample when it was finished, where they cost enough to
    be told one by one; neighbours that were finished together have the same. ``prepared``: they were prepared, not
    read for another lane or joined to a batch. ``handed``: of them went on to another lane.
    """

    epoch: int
    lane: str
    worker: int
    positions: Sequence[Span]
    samples: int
    sent: float
    begin: float
    end: float
    ends: list[float] | None
    prepared: bool
    handed: int


class Stalled(NamedTuple):
    """The training loop waited for this cause, from ``begin`` to ``end``."""

    epoch: int
    cause: str
    begin: float
    end: float


class BatchDelivered(NamedTuple):
    """Batch ``number`` of the epoch was handed over, after a wait of ``wait_s``: samples at these positions, and
    ``padded`` repeated ones."""

    epoch: int
    at: float
    number: int
    samples: int
    padded: int
    wait_s: float
    positions: Sequence[Span]


class Failed(NamedTuple):
    """Of the batch that was asked for, ``samples`` failed, and ``skipped`` are lost with them."""

    epoch: int
    at: float
    samples: int
    skipped: int


class Died(NamedTuple):
    """A worker of a lane ended that should not have; ``hung``: it was killed, because it had hung."""

    epoch: int
    at: float
    hung: bool


class EpochEnded(NamedTuple):
    """The training loop has been told that the epoch is over."""

    epoch: int
    at: float


Fact = EpochBegan | Drew | BytesFetched | BatchAsked | Worked | Stalled | BatchDelivered | Failed | Died | EpochEnded
Hearer = Callable[[Fact], None]


class Facts:
    """The stream of one loader's facts. ``hearers``: empty while nobody hears; looked at where facts would be made, so
    that nothing is called where none is."""

    __slots__ = ("hearers",)

    def __init__(self) -> None:
        self.hearers: tuple[Hearer, ...] = ()

    def subscribe(self, hearer: Hearer) -> None:
        """Have every fact from now on."""
        self.hearers = (*self.hearers, hearer)

    def unsubscribe(self, hearer: Hearer) -> None:
        """Have no more; nothing happens to who had none."""
        self.hearers = tuple(each for each in self.hearers if each != hearer)

    def tell(self, fact: Fact) -> None:
        """Something has happened."""
        for hear in self.hearers:
            try:
                hear(fact)
            except Exception:
                self.unsubscribe(hear)
                LOGGER.warning("%r hears nothing more of the loader, because it raised:", hear, exc_info=True)


NOBODY = Facts()
"""A stream that nobody hears."""
