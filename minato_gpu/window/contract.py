"""What an epoch's iterator may expect of what makes its batches: an engine, or the consumer's own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from minato_gpu.lanes.base import Failure
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.samples import Ticket, Value
from minato_gpu.spans import Span

Judge = Callable[[Sequence[Failure], int], None]
"""Told of the samples that a batch is to come without, and how many others it has; raises where it must not."""

NOTHING = object()
"""What comes in place of a batch of which every sample was left out."""


class EndOfEpoch(Exception):
    """The epoch has no further batch. It is no StopIteration, which a data set may raise itself."""


class Batches(Protocol):
    """Makes the batches of an epoch, one after the other."""

    log: Telemetry  # counts what is delivered and left out
    delivered: Sequence[Span] | None = None  # positions (of a stream: ticket) of the last batch, also if it raised
    good: Ticket | None = None  # the last sample of that batch, where some may be left out

    def next(self, number: int, judge: Judge, asked: Callable[[], None]) -> Value:
        """Returns the next batch of epoch ``number``, or NOTHING if it has lost all its samples.

        ``judge`` is asked about samples that are to be left out; ``asked`` is called before anything is fetched for the
        batch alone, and after its keys were drawn. Raises EndOfEpoch at the end, whatever preparing the batch raised,
        and what a sampler raised when it was drawn from last.
        """
