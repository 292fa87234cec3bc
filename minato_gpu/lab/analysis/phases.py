"""One phase of the analysis: how long it may last, the batches that are replayed in it, and what is measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import thread_time

import torch

from minato_gpu.device.collated import mapped
from minato_gpu.lab.analysis.profile import Phase, mean
from minato_gpu.samples import Value

SHARES: Mapping[str, float] = {
    "sight": 20.0,  # the loader as it is, for the first time: which files samples are in, a batch to replay
    "compute": 12.0,
    "copied": 5.0,  # a batch that has yet to be moved to the device
    "warm": 18.0,
    "cold": 20.0,
    "scaling": 18.0,
    "storage": 7.0,
}
"""Phases in their order, and what each may take of the whole, in percent."""
ROUNDS_UNTIL = 0.72
"""Share of the time until which phases are repeated, where an epoch is too short to fill them at once."""
LEAST = 2
"""The least number of batches of a phase, however long they take."""


class TimeBox:
    """Shares seconds out to phases. What one phase leaves over goes to those after it."""

    def __init__(self, seconds: float, begin: float) -> None:
        self.seconds = seconds
        self._begin = begin

    def passed(self, now: float) -> float:
        """The share of the time that has passed."""
        return (now - self._begin) / self.seconds

    def seconds_for(self, name: str, now: float) -> float:
        """Returns the seconds of a phase that begins now."""
        after = sum(list(SHARES.values())[list(SHARES).index(name) :])
        return max(0.0, self._begin + self.seconds - now) * SHARES[name] / after


def most_batches(length: int | None) -> int | None:
    """Returns the most batches of one phase: a quarter of an epoch, at least ``LEAST``; None for an unknown length."""
    return None if length is None else max(LEAST, length // 4)


def settling(workers: int, most: int | None) -> int:
    """Returns how many batches at the beginning of a phase do not count: workers have just started, and come in
    step."""
    return workers + 1 if most is None else min(workers + 1, most // 2)


_MOST = 4


class Replay:
    """Fresh copies of a few batches in turn, so that a step that changes its batch in place finds it as it was.

    A few, because batches may differ in size. What cannot be copied is given as it is.
    """

    def __init__(self) -> None:
        self._batches: list[Value] = []
        self._on_device: list[Value] = []
        self._pinned = self.was_on_device = False
        self._number = 0

    def record(self, batch: Value) -> None:
        """Keeps a copy of a batch, which nobody may have changed yet; of the first few only."""
        if len(self._batches) == _MOST:
            return
        if not self._batches:
            mapped(batch, self._look_at)
        self._batches.append(_copied(batch))

    def _look_at(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned |= torch.cuda.is_available() and tensor.is_pinned()
        self.was_on_device |= tensor.device.type != "cpu"
        return tensor

    def __len__(self) -> int:
        return len(self._batches)

    def fresh(self) -> Value:
        """Returns the next batch as the loader gave it: in pinned memory where it was."""
        batch = _copied(self._batches[self._next()])
        return mapped(batch, lambda tensor: tensor.pin_memory()) if self._pinned else batch

    def on_device(self) -> Value:
        """Returns the next batch where the step will want it, so that nothing is transferred."""
        number = self._next()
        if not self._on_device:
            self._on_device = [mapped(batch, lambda tensor: tensor.to(device())) for batch in self._batches]
        return _copied(self._on_device[number])

    def _next(self) -> int:
        self._number += 1
        return self._number % len(self._batches)


def device() -> torch.device | None:
    """Returns the device that this process computes on; None: the CPU."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if used else None


def _copied(batch: Value) -> Value:
    try:
        return copy.deepcopy(batch)
    except Exception:
        return batch


class Meter:
    """Measures one phase, perhaps in several rounds: wait, step and CPU time of each batch, in seconds."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.steps: list[float] = []
        self.cpus: list[float] = []
        self.first_wait: float | None = None
        self._skip = 0

    def begin(self, settle: int) -> None:
        """Begins a round, whose first ``settle`` batches do not count."""
        self._skip = settle

    def add(self, wait_s: float, step_s: float, cpu_s: float) -> None:
        """Adds a batch. ``cpu_s``: CPU seconds of the wait or of the step, whichever this phase measures."""
        if self.first_wait is None:
            self.first_wait = wait_s
        if self._skip:
            self._skip -= 1
            return
        self.waits.append(wait_s)
        self.steps.append(step_s)
        self.cpus.append(cpu_s)

    def drain(self, clock: Callable[[], float]) -> None:
        """Waits until the device has finished, and adds that time to the last step."""
        if (where := device()) is not None:
            begin = clock()
            torch.cuda.synchronize(where)
            if self.steps:
                self.steps[-1] += clock() - begin

    def taken(
        self,
        numbers: Iterable[int],
        made: Callable[[], Iterable[Value]],
        step_s: Callable[[], float],
        clock: Callable[[], float],
    ) -> Iterator[Value]:
        """Yields a batch of the loader ``made()`` for each of ``numbers``, at most as many as it has.

        ``step_s()`` then returns the seconds that the step on it took.
        """
        source: Iterator[Value] | None = None
        for _ in numbers:
            begin, on_core = clock(), thread_time()
            try:
                if source is None:  # workers start while the first batch is waited for
                    source = iter(made())
                batch = next(source)
            except StopIteration:
                break
            wait_s, cpu_s = clock() - begin, thread_time() - on_core
            yield batch
            del batch
            self.add(wait_s, step_s(), cpu_s)
        self.drain(clock)

    def phase(self) -> Phase:
        """Returns the phase as measured."""
        both = tuple(wait + step for wait, step in zip(self.waits, self.steps, strict=True))
        return Phase(both, mean(self.waits))

    @property
    def cpu_s(self) -> float:
        """CPU seconds of a batch, on average."""
        return mean(self.cpus)
