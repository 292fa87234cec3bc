"""The device lane's current step, for its watchdog: written by the lane's thread, read by others without a lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple, TypeVar

from minato_gpu.samples import Value

Item = TypeVar("Item")
_TOGETHER = 8  # items between two pauses


class StepState(NamedTuple):
    """One step of the lane's thread."""

    since: float  # time of ``perf_counter``, in seconds
    stage: int  # number of the stage that it is at; -1: none
    sample: Value  # its number or its drawn parameters; None: not one sample
    samples: int  # how many at once


class CurrentStep:
    """The step in progress. It is replaced as one tuple, so that a reader in another thread sees a consistent one.

    Decision: a function segment identifies a sample by its parameters, an object of the sample's own; its number is
    looked up only when somebody asks. Rejected: handing numbers down through every segment, for a question that is
    almost never asked.
    """

    def __init__(self) -> None:
        self.step = StepState(0.0, -1, None, 1)
        self.between: Callable[[], None] = lambda: None  # called by the thread before each step
        self.scheduled: Callable[[], None] = lambda: None  # called once DALI has a micro-batch, before waiting for it
        self._drawn: Sequence[object] = ()  # parameters of the running samples
        self._first = 0  # number of the first of them

    def enter(self, stage: int = -1, sample: Value = None, samples: int = 1) -> None:
        """Begins a step; calls ``between`` first."""
        self.between()
        self.step = StepState(perf_counter(), stage, sample, samples)

    def pause(self) -> None:
        """Calls ``between`` in the middle of a step, which goes on afterwards with its old begin."""
        step = self.step
        self.between()
        self.step = step

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields ``items``, with a pause before every eighth: for work of a few microseconds an item."""
        for number, item in enumerate(items):
            if number % _TOGETHER == 0:
                self.pause()
            yield item

    def prepared(self, drawn: Sequence[object], first: int) -> None:
        """Sets the parameters of the micro-batch that runs now; its samples are numbered from ``first`` on."""
        self._drawn, self._first = drawn, first

    def number(self, step: StepState) -> int | None:
        """Returns the number of a step's sample in its task; None where the step is not at one sample."""
        if isinstance(step.sample, int):
            return step.sample
        drawn, first = self._drawn, self._first
        found = (first + at for at, params in enumerate(drawn) if params is step.sample)
        return None if step.sample is None else next(found, None)
