"""Other settings, really run: what was predicted of them is shown beside what they take.

A setting is tried as a phase is measured: batches of a loader like the script's, with the script's own step. What its
time does not suffice for, of an epoch, is taken to go on as the batches before did. So is what comes after the samples
that the phases saw, where bytes come from storage, and of the others nobody knows which files to drop from memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from minato_gpu.lab.analysis import files
from minato_gpu.lab.analysis.phases import LEAST, Meter, settling
from minato_gpu.lab.analysis.profile import CannotTry, Setting, Trial
from minato_gpu.lab.analysis.questions import to_verify
from minato_gpu.lab.analysis.script import in_one_line
from minato_gpu.samples import Value
from minato_gpu.sources.source import Source, source_of

if TYPE_CHECKING:
    from minato_gpu.lab.analysis.findings import Findings
    from minato_gpu.lab.analysis.profile import Profile
    from minato_gpu.lab.analysis.subject import Subject

NO_TIME = "no time was left for it"
ENDED = "the script had ended"
_ROUNDS = 10
_EPOCHS_OF_A_CACHE = 2  # one that fills it


class Trials:
    """Tries, in turn, all settings of the usual questions that this machine can run, for ``seconds`` together.

    ``saved`` is called whenever more is known.
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
        self._declared = _declared_files(findings.subject)
        self._files = list(dict.fromkeys([*findings.files, *self._declared]))
        self._until = clock() + seconds
        self._now: Setting | None = None
        settings = dict.fromkeys(point.changes for point in to_verify(profile))
        # a step may not take batches of another size: what goes before is known by then
        ordered = sorted(settings, key=lambda setting: (setting.batch_size is not None, setting != Setting()))
        self._found = {setting: Trial(setting, why_not=NO_TIME) for setting in ordered}

    @property
    def found(self) -> list[Trial]:
        """The trials so far."""
        return list(self._found.values())

    def cut_short(self, why: str) -> None:
        """There will be no more steps."""
        for setting, trial in self._found.items():
            if trial.why_not == NO_TIME:
                self._found[setting] = replace(trial, why_not=why if setting == self._now else ENDED)

    def batches(self, step_s: Callable[[], float]) -> Iterator[Value]:
        """Batches for the script. ``step_s``: seconds of its step on the batch before."""
        took = dict.fromkeys(self._found, 0.0)
        for number in range(_ROUNDS):
            going = [setting for setting in self._found if not number or self._found[setting].epoch_s]
            for at, setting in enumerate(going):
                begin = self._clock()
                left = self._until - begin
                share = left / (len(going) - at) if not number else left
                if left <= took[setting]:
                    continue
                yield from self._once(setting, begin + share, step_s)
                took[setting] = self._clock() - begin
                self._saved()

    def _once(self, setting: Setting, until: float, step_s: Callable[[], float]) -> Iterator[Value]:
        """Tries the setting once; what its loader raises is its own."""
        self._now, trial = setting, self._found[setting]
        try:
            with _on_cores(setting.cores):
                epoch_s = yield from self._epoch(setting, until, step_s)
            self._found[setting] = replace(trial, epoch_s=(*trial.epoch_s, epoch_s), why_not="")
        except Exception as error:
            why = str(error) if isinstance(error, CannotTry) else in_one_line(error)
            self._found[setting] = replace(trial, why_not=why)
        finally:
            self._now = None

    def _epoch(self, setting: Setting, until: float, step_s: Callable[[], float]) -> Generator[Value, None, float]:
        """Seconds of an epoch."""
        profile = setting.applied(self._profile)
        subject, size = self._findings.subject, profile.batch_size
        batches = list(subject.keys)  # empty for a stream
        if setting.batch_size is not None:
            keys = [key for batch in batches for key in batch]
            batches = [keys[at : at + size] for at in range(0, len(keys), size)]
        most = math.ceil(self._findings.batches_seen * subject.batch_size / size)
        if profile.storage is None or self._declared:
            most = len(batches) or most
        loader = subject.in_setting(setting, batches, self._cache_bytes(setting))
        self._cool(profile)
        if setting.cache is not None:
            self._check_time(until, most)
            yield from Meter().taken(range(most), lambda: loader, step_s, self._clock)
            self._cool(profile)
        settle, meter = settling(profile.workers, most), Meter()
        numbers = takewhile(lambda number: number < settle + LEAST or self._clock() < until, range(most))
        yield from meter.taken(numbers, lambda: loader, step_s, self._clock)
        times = meter.phase().batch_s
        if len(times) <= settle:
            raise CannotTry(NO_TIME)
        each = fmean(times[settle:])
        if profile.persistent or setting.cache is not None:  # workers are there, and in step
            return each * profile.batches
        return math.fsum(times) + each * max(0, profile.batches - len(times))

    def _cool(self, profile: Profile) -> None:
        """Drops the samples' files from memory, as when storage was measured."""
        if profile.storage is not None:
            files.drop(self._files)

    def _cache_bytes(self, setting: Setting) -> int | None:
        if setting.cache is None:
            return None
        if not self._declared:
            raise CannotTry("the data set declares no sources: there is nothing to keep")
        storage = self._profile.storage
        assert storage is not None  # else nobody asks for a cache
        return math.ceil(setting.cache * self._profile.samples * storage.nbytes)

    def _check_time(self, until: float, batches: int) -> None:
        """A cache is of use from the second epoch on. Raises CannotTry where the two take too long."""
        phase = self._profile.phases.get("cold") or self._profile.phases.get("warm")
        each = 0.0 if phase is None else phase.each_s
        if _EPOCHS_OF_A_CACHE * batches * each > until - self._clock():
            raise CannotTry(NO_TIME)


def _declared_files(subject: Subject) -> list[str]:
    """Returns the files of all known samples, as far as the data set declares them."""
    declared = source_of(subject.loader.dataset)
    if declared is None:
        return []
    found: dict[str, None] = {}
    with suppress(Exception):  # what the data set's own code raises it will raise again where it is of interest
        for key in chain.from_iterable(subject.keys):
            sources = declared(key)
            found |= dict.fromkeys(str(each.path) for each in ((sources,) if isinstance(sources, Source) else sources))
    return list(found)


@contextmanager
def _on_cores(count: int | None) -> Iterator[None]:
    """Confines all threads of this process, and what they start, to so many cores (None: unchanged)."""
    if count is None:
        yield
        return
    before = {}
    for thread in [int(each.name) for each in Path("/proc/self/task").iterdir()]:
        with suppress(OSError):
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, sorted(before[thread])[:count])
    try:
        yield
    finally:
        for thread, cores in before.items():
            with suppress(OSError):  # it may have ended
                os.sched_setaffinity(thread, cores)
