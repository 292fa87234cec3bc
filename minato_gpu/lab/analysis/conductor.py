"""The analysis, as the script sees it: its loader is found without editing it, and gives batches phase by phase.

``iter(loader)`` leads here. Of several loaders the one for training is analysed: the first that is asked for its third
batch while gradients are enabled (validation runs without); those of the same shape that a script makes for later
epochs stand for it. Until then, and all others, loaders deliver what they always do. A class that has an ``__iter__``
of its own, and does not call PyTorch's, is not seen.

The script asks for batches as ever. Phases: *sight* (the loader as it is), *compute* (recorded batches that are already
on the device), *copied* (recorded batches copied there), *warm* (all files in memory), *cold* (none). These hand the
script batches, as they include its step; the other measurements run while it waits for its next batch. Once all is
measured, asking for a batch raises ``Over``, which unwinds the script. Its epochs have as many batches as they had.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter, process_time
from typing import Any

import torch
from torch.utils.data import DataLoader

from minato_gpu import loader as ours
from minato_gpu.lab.analysis import files
from minato_gpu.lab.analysis.findings import Findings
from minato_gpu.lab.analysis.phases import LEAST, ROUNDS_UNTIL, Replay, TimeBox, device, most_batches, settling
from minato_gpu.lab.analysis.ranks import Lockstep
from minato_gpu.lab.analysis.standalone import Standalone
from minato_gpu.lab.analysis.subject import Subject
from minato_gpu.lab.analysis.trials import Trials
from minato_gpu.samples import Value
from minato_gpu.sampling.samplers import length_of

_WARM_SHARE = 0.95  # share of the files' bytes in memory: at least, for warm
_COLD_SHARE = 0.05  # at most, for cold
_MOST_ROUNDS = 50


class Over(BaseException):
    """The analysis has what it needs: the script ends here."""


class Conductor:
    """Runs the phases of an analysis: gives the script's loop its batches, and measures."""

    def __init__(
        self,
        subject: Subject,
        seconds: float,
        save: Callable[[], None],
        lockstep: Lockstep,
        clock: Callable[[], float] = perf_counter,
        verify_s: float = 0.0,
    ) -> None:
        """``seconds`` and ``verify_s``: time for the phases, and for trials of other settings."""
        self.subject, self.findings = subject, Findings(subject)
        self.save, self.lockstep, self._clock = save, lockstep, clock  # ``save`` is called whenever more is known
        self._agreed = lockstep.agreed
        self._box = TimeBox(seconds, clock())
        self._most = most_batches(subject.length)
        self._warmup = settling(subject.workers, self._most)
        self._alone = Standalone(self.findings, self._box, clock)
        self._analysis = self._phases()
        self._ahead: list[Value] = []  # the next batch, if it has been obtained
        self._handed_at: float | None = None  # when the script was given its last batch; None: its step has ended
        self._step_s = self._step_cpu_s = self._cpu_at = 0.0  # the script's last step; CPU time at its beginning
        self._parent = os.getppid()  # process that started the analysis
        self._replay = Replay()  # recorded batches
        self._verify_s = verify_s  # seconds for trials of other settings; 0: none
        self.trials: Trials | None = None
        self.measured = False  # every phase was measured
        self.over = False  # no more batches: the script is to end

    # --- the script's side ---------------------------------------------------------------------------------

    def asked(self) -> None:
        """Measures the step that ends as the script asks for the next batch, or comes to the end of its epoch.

        Raises Over if the process that started the analysis is gone.
        """
        if self._handed_at is not None:
            self._step_s, self._handed_at = self._clock() - self._handed_at, None
            self._step_cpu_s = process_time() - self._cpu_at
        if os.getppid() != self._parent:  # who started this has been killed
            self.over = True
            raise Over

    def next(self) -> Value:
        """Returns the next batch for the script. Raises Over where there is nothing left to measure."""
        self.look_ahead()
        batch = self._ahead.pop()
        self._cpu_at, self._handed_at = process_time(), self._clock()
        return batch

    def look_ahead(self) -> None:
        """Obtains the next batch ahead of need. Raises Over where there is nothing left to measure."""
        if self._ahead:
            return
        if self.over:
            raise Over
        try:
            self._ahead.append(next(self._analysis))
        except StopIteration:
            self.over = True
            raise Over from None

    def script_ended(self) -> None:
        """Runs the measurements that need no step, once the script has ended."""
        if self.over:
            return
        self.over = True
        self._analysis.close()
        self._ahead.clear()
        if not self.measured:
            self._without_script()

    # --- phases --------------------------------------------------------------------------------------------

    def _phases(self) -> Generator[Value, None, None]:
        """Yields batches for the script, phase by phase."""
        yield from self._loaded("sight")
        self.save()
        for number in range(_MOST_ROUNDS):
            yield from self._round()
            # an epoch that is too short for one round to fill the time leaves time for others
            if self._agreed(self._box.passed(self._clock()) * (number + 2) / (number + 1) > ROUNDS_UNTIL):
                break
        self._without_script()
        self.measured = True
        if self._verify_s:
            yield from self._trial_batches()

    def _trial_batches(self) -> Iterator[Value]:
        """Yields the batches of trial epochs with other loader settings."""
        found = self.findings
        profile = found.profile(0, 1)
        if not profile.suffices:
            found.note("Too little is known to predict from (an epoch's length, say): no other setting was tried.")
            return
        self.trials = Trials(found, profile, self._verify_s, self.save, self._clock)
        yield from self.trials.batches(lambda: self._step_s)

    def _round(self) -> Iterator[Value]:
        """Yields the batches of one round of all phases after ``sight``."""
        yield from self._replayed("compute")
        if device() is not None and not self._replay.was_on_device:
            yield from self._replayed("copied")
        self.save()
        self._alone.warmed(_WARM_SHARE)
        yield from self._loaded("warm")
        self.save()
        if self._agreed(not self._cool()):
            return
        yield from self._loaded("cold")
        self.save()

    def _cool(self) -> bool:
        """Asks the kernel to drop the samples' files from the page cache.

        Returns False if the files are not known, or over 5 % of their bytes stayed there; True also where the kernel
        does not tell.
        """
        found, paths = self.findings, self.findings.files
        if not paths:
            found.note("Which files samples are in could not be seen: nothing is known of fetching them.")
            return False
        files.drop(paths)
        found.cold_share = cached = files.cached_share(paths)
        if cached is None:
            found.note("This kernel does not tell what the page cache holds (cachestat): cold may not have been cold.")
        elif cached > _COLD_SHARE:
            found.note(
                f"The page cache kept {cached:.0%} of the samples' files (in use elsewhere, or on a file system "
                "in memory): nothing is known of fetching them."
            )
            return False
        return True

    def _without_script(self) -> None:
        self._alone.run()
        self.save()

    # --- one phase -----------------------------------------------------------------------------------------

    def _replayed(self, name: str) -> Iterator[Value]:
        """Yields recorded batches again and again, until the phase has had enough."""
        replay, meter = self._replay, self.findings.meters[name]
        meter.begin(1 if (self._most or 3) > LEAST else 0)
        fresh = replay.fresh if name == "copied" or device() is None else replay.on_device
        for _ in self._until(name, self._most if replay else 0):
            yield fresh()
            meter.add(0.0, self._step_s, self._step_cpu_s)
        meter.drain(self._clock)

    def _loaded(self, name: str) -> Iterator[Value]:
        """Yields batches of a loader like the script's. ``name``: of the phase, whose workers note what they see."""
        meter, taken, is_first = self.findings.meters[name], 0, name == "sight"
        meter.begin(self._warmup)
        numbers = self._until(name, self._most if is_first else self.findings.batches_seen)
        like = partial(self.subject.like, name, looks=is_first)
        for batch in meter.taken(numbers, like, lambda: self._step_s, self._clock):
            taken += 1
            if is_first:
                self._replay.record(batch)
            yield batch
            del batch
        if name != "cold":  # whose batches are only timed
            self.findings.noted(name)
        if is_first:
            self.findings.batches_seen = taken

    def _until(self, name: str, most: int | None) -> Iterator[int]:
        """Yields numbers of batches, until all ranks agree that the phase has had enough."""
        begin, number = self._clock(), 0
        seconds = self._box.seconds_for(name, begin)
        while not self._agreed(
            number >= (math.inf if most is None else most) or (number >= LEAST + 1 and self._clock() - begin >= seconds)
        ):
            yield number
            number += 1


_CHOICE_AFTER = 2  # a loader has given so many batches before it may be chosen


@dataclass(eq=False)
class ScriptLoader:
    """A loader that the script has iterated."""

    loader: weakref.ref[Any]
    given: int = 0  # batches that it has given


class Loaders:
    """Finds all loaders that the script iterates, and chooses the one to measure."""

    def __init__(self, begin: Callable[[Any], Conductor], number: int | None = None) -> None:
        self._begin, self._number = begin, number  # makes the conductor; which loader, from 1 on, if the user says so
        self._known: list[ScriptLoader] = []
        self.conductor: Conductor | None = None

    def install(self) -> None:
        """Replaces ``__iter__`` of the loaders' classes, for this process's life (what it forks inherits that)."""
        for kind in (DataLoader, ours.DataLoader):
            kind.__iter__ = self._in_place_of(kind.__iter__)  # type: ignore[method-assign]

    def _in_place_of(self, original: Callable[[Any], Iterator[Value]]) -> Callable[[Any], Iterator[Value]]:
        """Returns the ``__iter__`` that a loader's class gets."""

        def iterated(loader: Any) -> Iterator[Value]:
            conductor = self.conductor
            if conductor is None:
                return ScriptEpoch(self, loader, original(loader), self._known_as(loader))
            if _stands_for(loader, conductor.subject):
                return ScriptEpoch(self, loader, iter(()), ScriptLoader(weakref.ref(loader)), conductor)
            return original(loader)

        return iterated

    def _known_as(self, loader: Any) -> ScriptLoader:
        found = next((each for each in self._known if each.loader() is loader), None)
        if found is None:
            self._known.append(found := ScriptLoader(weakref.ref(loader)))
        return found

    def is_for_training(self, known: ScriptLoader) -> bool:
        """Returns whether to analyse this loader: the one that the user has numbered, else the one for training.
        False once one has been chosen."""
        if self.conductor is not None:
            return False
        if self._number is not None:
            return self._known[self._number - 1 : self._number] == [known]
        return known.given >= _CHOICE_AFTER and torch.is_grad_enabled()

    def choose(self, loader: Any) -> Conductor:
        """Makes the conductor of this loader's analysis."""
        self.conductor = self._begin(loader)
        self.conductor.save()
        return self.conductor

    def described(self) -> list[str]:
        """Returns a line on each loader."""
        found = []
        for number, known in enumerate(self._known, 1):
            loader, what = known.loader(), "gone"
            if loader is not None:
                length = "an unknown number of" if (told := length_of(loader)) is None else told
                what = f"{type(loader).__module__}.{type(loader).__qualname__}, {length} batches an epoch"
            chosen = self.conductor is not None and loader is self.conductor.subject.loader
            asked = "analysed" if chosen else f"asked for {known.given} batches"
            found.append(f"loader {number} ({what}): {asked}")
        return found


def _stands_for(loader: Any, subject: Subject) -> bool:
    """Returns whether this is the loader that is analysed, or one that the script has made for its next epoch."""
    return loader is subject.loader or (torch.is_grad_enabled() and subject.is_followed_by(loader))


class ScriptEpoch:
    """The iterator that the script gets.

    It yields the loader's own batches until the loader turns out to be the one to analyse, then the conductor's; the
    epoch keeps its number of batches.
    """

    def __init__(
        self,
        loaders: Loaders,
        loader: Any,
        batches: Iterator[Value],
        known: ScriptLoader,
        conductor: Conductor | None = None,
    ) -> None:
        self._loaders, self._loader, self._batches, self._known = loaders, loader, batches, known
        self._conductor = conductor
        self._length = length_of(loader)
        self._given = 0

    def __iter__(self) -> ScriptEpoch:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __next__(self) -> Value:
        has_more = self._length is None or self._given < self._length  # the end of an epoch stays what it is
        if self._conductor is None and has_more and self._loaders.is_for_training(self._known):
            self._take_over()
        if self._conductor is None:
            batch = next(self._batches)
            self._known.given += 1
        else:
            self._conductor.asked()
            if not has_more:
                self._conductor.look_ahead()  # ends the script, where nothing is left to measure
                raise StopIteration
            batch = self._conductor.next()
        self._given += 1
        return batch

    def _take_over(self) -> None:
        self._batches = iter(())  # its workers end
        if hasattr(self._loader, "_iterator"):  # of torch's loader with workers that stay
            self._loader._iterator = None
        self._conductor = self._loaders.choose(self._loader)
