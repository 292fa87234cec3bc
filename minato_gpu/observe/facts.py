"""The events of a loader's epochs as small records (facts), and the stream on which they are published.

Rooms report to the log of an epoch (telemetry.py). It counts, and publishes facts to subscribers, such as a trace.
Without a subscriber no fact is made. Times are seconds of the monotonic clock (``time.perf_counter``). Positions are
places in the sampler's order; streams have none, so theirs count batches.

Subscribers are called on the thread that publishes, in the training process, perhaps with the engine's lock held: they
note what they get and return. A subscriber that raises is logged once and dropped: it must not end a training run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from minato_gpu.scheduling.spans import Span
from minato_gpu.util.messages import LOGGER


class EpochBegan(NamedTuple):
    """An epoch begins."""

    epoch: int
    at: float
    samples: int | None  # samples that it will have; None where nobody knows


class BatchAsked(NamedTuple):
    """The training loop asks for its next batch.

    On the same thread BatchDelivered, EpochEnded or an error follows, each perhaps after Failed.
    """

    epoch: int
    at: float


class Worked(NamedTuple):
    """A slot of a lane (a worker, say) has worked on samples."""

    epoch: int
    lane: str
    worker: int  # the slot's number
    positions: Sequence[Span]
    samples: int
    sent: float  # when they were given to the lane
    begin: float
    end: float
    ends: list[float] | None  # when each costly sample was finished; equal for neighbours that were finished together
    prepared: bool  # False: they were only read for another lane, or joined
    handed: int  # how many of them went on to another lane


class Stalled(NamedTuple):
    """The training loop waited for a batch: the part of a wait that is due to one cause."""

    epoch: int
    cause: str
    begin: float
    end: float


class BatchDelivered(NamedTuple):
    """A batch was handed to the training loop."""

    epoch: int
    at: float
    number: int  # number of the batch in the epoch
    samples: int
    padded: int  # repeated samples in it
    wait_s: float
    positions: Sequence[Span]


class Failed(NamedTuple):
    """Samples of the batch that was asked for have failed: it raises, or comes without them."""

    epoch: int
    at: float
    samples: int  # samples that failed
    skipped: int  # other samples of the batch, which are lost with them if it raises


class Died(NamedTuple):
    """A worker ended that should not have."""

    epoch: int
    at: float
    hung: bool  # it was killed, because it had hung


class EpochEnded(NamedTuple):
    """The training loop has seen the end of the epoch."""

    epoch: int
    at: float


Fact = EpochBegan | BatchAsked | Worked | Stalled | BatchDelivered | Failed | Died | EpochEnded
Subscriber = Callable[[Fact], None]


class Facts:
    """Publishes one loader's facts.

    ``subscribers`` is empty while nobody listens; whoever would make a fact looks at it first.
    """

    __slots__ = ("subscribers",)

    def __init__(self) -> None:
        self.subscribers: tuple[Subscriber, ...] = ()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Adds a subscriber, which gets every fact from now on."""
        self.subscribers = (*self.subscribers, subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Removes a subscriber, if it is one."""
        self.subscribers = tuple(each for each in self.subscribers if each != subscriber)

    def publish(self, fact: Fact) -> None:
        """Calls every subscriber with the fact; one that raises is logged and removed."""
        for subscriber in self.subscribers:
            try:
                subscriber(fact)
            except Exception:
                self.unsubscribe(subscriber)
                LOGGER.warning("%r hears nothing more of the loader, because it raised:", subscriber, exc_info=True)


NO_SUBSCRIBERS = Facts()
"""Facts without subscribers, for rooms that are used without a loader."""
