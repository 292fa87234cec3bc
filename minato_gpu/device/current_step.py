"""What the device lane's thread is at: written by that thread alone, read by whoever watches it, without a lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple, TypeVar

from minato_gpu.samples import Value

Item = TypeVar("Item")
_TOGETHER = 8


class StepState(NamedTuple):
    """Since when, in which stage (-1: none), with which sample (its number, or its drawn parameters; None: not one),
    and how many samples at once."""

    since: float
    stage: int
    sample: Value
    samples: int


class CurrentStep:
    """The step under way. One tuple takes the place of another, so a reader sees one or the other.

    ``between``: called by the thread before each step, for what must not wait until the step is over; ``scheduled``:
    once the device has been asked for a micro-batch, for what can be done before it is waited for.

    Decision: a function knows a sample by its parameters, an object of the sample's own, and which number that is is
    only looked up when somebody asks. Rejected: numbers handed down through every segment, for what happens never.
    """

    def __init__(self) -> None:
        self.step = StepState(0.0, -1, None, 1)
        self.between: Callable[[], None] = lambda: None
        self.scheduled: Callable[[], None] = lambda: None
        self._drawn: Sequence[object] = ()
        self._first = 0

    def enter(self, stage: int = -1, sample: Value = None, samples: int = 1) -> None:
        """The thread goes on to this."""
        self.between()
        self.step = StepState(perf_counter(), stage, sample, samples)

    def pause(self) -> None:
        """The step goes on after this; there is time for other things."""
        step = self.step
        self.between()
        self.step = step

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, of which each takes a few microseconds, with a pause for every few of them."""
        for number, item in enumerate(items):
            if number % _TOGETHER == 0:
                self.pause()
            yield item

    def prepared(self, drawn: Sequence[object], first: int) -> None:
        """The parameters of the micro-batch that runs now; its samples are numbered from ``first`` on."""
        self._drawn, self._first = drawn, first

    def number(self, step: StepState) -> int | None:
        """The number of the step's sample, where it is at one."""
        if isinstance(step.sample, int):
            return step.sample
        drawn, first = self._drawn, self._first
        found = (first + at for at, params in enumerate(drawn) if params is step.sample)
        return None if step.sample is None else next(found, None)
