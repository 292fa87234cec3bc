"""How long the training loop waited for each batch, and how long it then was at work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from time import thread_time

from minato_gpu.lab.analysis.profile import Phase, mean
from minato_gpu.lab.analysis.replay import device, wait_for_device
from minato_gpu.samples import Value


class Meter:
    """One phase, perhaps in several rounds."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.steps: list[float] = []
        self.cpus: list[float] = []
        self.first_wait: float | None = None
        self._skip = 0

    def begin(self, settle: int) -> None:
        """A round begins, whose first batches do not count."""
        self._skip = settle

    def add(self, wait_s: float, step_s: float, cpu_s: float) -> None:
        """A batch was waited for and worked on. ``cpu_s``: on cores, in what of the two is of interest."""
        if self.first_wait is None:
            self.first_wait = wait_s
        if self._skip:
            self._skip -= 1
            return
        self.waits.append(wait_s)
        self.steps.append(step_s)
        self.cpus.append(cpu_s)

    def drain(self, clock: Callable[[], float]) -> None:
        """Wait for the device, which was still at work when the last step returned."""
        begin = clock()
        wait_for_device()
        if self.steps and device() is not None:
            self.steps[-1] += clock() - begin

    def taken(
        self,
        numbers: Iterable[int],
        made: Callable[[], Iterable[Value]],
        step_s: Callable[[], float],
        clock: Callable[[], float],
    ) -> Iterator[Value]:
        """Batches of the loader that is ``made``, as many as there are numbers; each is worked on before the next one
        is asked for, for ``step_s`` seconds."""
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
        """What was measured."""
        both = tuple(wait + step for wait, step in zip(self.waits, self.steps, strict=True))
        return Phase(len(both), math.fsum(both), math.fsum(self.waits), both)

    @property
    def cpu_s(self) -> float:
        """On cores, for a batch on average."""
        return mean(self.cpus)
