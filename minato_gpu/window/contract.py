"""The interface through which an epoch's iterator gets batches: of an engine, or of the consumer's own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from minato_gpu.lanes.base import Failure
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.samples import Ticket, Value
from minato_gpu.scheduling.spans import Span

Judge = Callable[[Sequence[Failure], int], None]
"""Called with the samples that a batch is to come without, and how many others it has; raises if it must not come."""

NOTHING = object()
"""Stands for a batch of which every sample was left out."""


class EndOfEpoch(Exception):
    """Raised where the epoch has no further batch. It is no StopIteration, which a data set may raise itself."""


class Batches(Protocol):
    """Makes the batches of an epoch, one after the other."""

    log: Telemetry  # counts what is delivered and left out
    delivered: Sequence[Span] | None = None  # positions (of a stream: ticket) of the last batch, also if it raised
    last_good: Ticket | None = None  # the last sample of that batch that did not fail, where some may be left out

    def next(self, number: int, judge: Judge, asked: Callable[[], None]) -> Value:
        """Returns the next batch of epoch ``number``, or NOTHING if it has lost all its samples.

        ``judge`` is called with samples that are to be left out. ``asked`` is called before the batch is taken, or
        prepared here after its keys were drawn: then a state's torch generator is recorded. Raises EndOfEpoch at the
        end, else the error of preparing the batch or of drawing its keys.
        """
