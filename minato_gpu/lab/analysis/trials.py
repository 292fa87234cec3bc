"""Other settings, really run: what was predicted of them is shown beside what they take.

A setting is tried as a phase is measured: batches of a loader like the script's, with the script's own step. What its
time does not suffice for, of an epoch, is taken to go on as the batches before did. So is what comes after the samples
that the phases saw, where bytes come from storage: nobody knows which files of the others to drop from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from itertools import takewhile
from statistics import fmean
from typing import TYPE_CHECKING

from minato_gpu.lab.analysis import files
from minato_gpu.lab.analysis.phases import LEAST, Meter, settling
from minato_gpu.lab.analysis.predict import points
from minato_gpu.lab.analysis.profile import Setting, Trial
from minato_gpu.lab.analysis.script import in_one_line
from minato_gpu.samples import Value

if TYPE_CHECKING:
    from minato_gpu.lab.analysis.findings import Findings
    from minato_gpu.lab.analysis.profile import Profile


class Trials:
    """Tries all settings of the usual questions that this machine can run, each once, for ``seconds`` together.

    ``found``: those that were tried. ``saved`` is called whenever there is one more.
    """

    def __init__(
        self,
        findings: Findings,
        profile: Profile,
        seconds: float,
        saved: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._findings, self._profile, self._saved, self._clock = findings, profile, saved, clock
        self._until = clock() + seconds
        self.found: list[Trial] = []

    def batches(self, step_s: Callable[[], float]) -> Iterator[Value]:
        """Yields batches for the script. ``step_s``: seconds of its step on the batch before."""
        settings = dict.fromkeys(point.setting for point in points(self._profile) if point.runs_here)
        ordered = sorted(settings, key=lambda setting: setting != Setting())  # as it is first
        for at, setting in enumerate(ordered):
            begin = self._clock()
            if begin >= self._until:
                return
            try:
                epoch_s = yield from self._epoch(setting, begin + (self._until - begin) / (len(ordered) - at), step_s)
                self.found.append(Trial(setting, epoch_s))
            except Exception as error:  # what its loader raises is its own
                self.found.append(Trial(setting, why_not=in_one_line(error)))
            self._saved()

    def _epoch(self, setting: Setting, until: float, step_s: Callable[[], float]) -> Generator[Value, None, float]:
        """Yields batches in this setting, and returns the seconds of an epoch.

        Raises ValueError if it has too few batches, and what its loader raises.
        """
        profile = setting.applied(self._profile)
        subject = self._findings.subject
        most = len(subject.keys)  # 0 for a stream
        if profile.storage is not None or not most:
            most = self._findings.batches_seen
        if profile.storage is not None:
            files.drop(self._findings.files)
        loader = subject.like(workers=setting.workers, kind=setting.loader)
        settle, meter = settling(profile.workers, most), Meter()
        numbers = takewhile(lambda number: number < settle + LEAST or self._clock() < until, range(most))
        yield from meter.taken(numbers, lambda: loader, step_s, self._clock)
        times = meter.phase().batch_s
        if len(times) <= settle:
            raise ValueError("an epoch has too few batches")
        each = fmean(times[settle:])
        if profile.persistent:  # workers are there, and in step
            return each * profile.batches
        return math.fsum(times) + each * max(0, profile.batches - len(times))
