"""How long the training loop waited for each batch, and how long it then was at work."""

from __future__ import annotations

import math

from minato_gpu.analysis.profile import Phase


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

    def add_to_last(self, seconds: float) -> None:
        """The device was still at work when the last step returned."""
        if self.steps:
            self.steps[-1] += seconds

    def phase(self) -> Phase:
        """What was measured."""
        both = tuple(wait + step for wait, step in zip(self.waits, self.steps, strict=True))
        return Phase(len(both), math.fsum(both), math.fsum(self.waits), both)

    @property
    def cpu_s(self) -> float:
        """On cores, for a batch on average."""
        return math.fsum(self.cpus) / len(self.cpus) if self.cpus else 0.0
