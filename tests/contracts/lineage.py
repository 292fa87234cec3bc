"""One loader and its successors: what came of an epoch, by whichever of them, against what the oracle says."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import io
import mmap
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import minato_gpu
from tests.contracts import oracle
from tests.contracts.cases import Case, Step
from tests.contracts.counts import counts_of_epoch, counts_of_part
from tests.contracts.material import Data, data_of, samples_of, written
from tests.contracts.oracle import Drawn
from tests.contracts.orders import orders
from tests.contracts.run import Outcome, Part, Raised, loaders_of, run, stored

TIMEOUT_S = 60.0  # a batch that takes longer is taken to hang
HANG_S = 2.0
MOST = 60  # batches of an epoch: one that goes on for ever is cut off
_FORK = multiprocessing.get_context("fork")


def _without_memory() -> None:
    """Does what a write to shared memory does where no memory is left."""
    fd = os.memfd_create("chaos")
    os.ftruncate(fd, mmap.PAGESIZE)
    page = mmap.mmap(fd, mmap.PAGESIZE)
    os.ftruncate(fd, 0)
    page[0] = 1


DEATHS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": lambda: ctypes.string_at(0),
    "full shared memory": _without_memory,
    "exit": lambda: os._exit(7),
    "hang": lambda: threading.Event().wait(),
}


@dataclass(frozen=True)
class Saved:
    """A state, and what had come when it was saved.

    ``parts``: of epoch ``epoch``, until then, by whichever loader; ``ended``: that is all of it. ``told``: what
    ``set_epoch`` has told the sampler last; ``order``: what it had before the epoch's order was drawn. ``drawn``:
    whether it is known what samples draw. ``died``: a worker has died that was not replaced.
    """

    state: Any = None
    epoch: int = -1
    told: int = 0
    order: int = 0
    parts: tuple[Part, ...] = ()
    ended: bool = True
    drawn: bool = True
    died: bool = False


class WrongError(AssertionError):
    """What came is not what must come."""


class Lineage:
    """A loader of a case, what it delivers, and what its predecessors have delivered.

    ``death``: how a worker dies at the case's deadly sample; "": none does. ``budget``: ``host_memory_budget``.
    ``checks``: what comes is checked at once.
    """

    checks = True

    def __init__(self, case: Case, folder: Path, death: str = "", budget: int | None = None) -> None:
        self.case, self.folder, self.death, self.budget = case, folder, death, budget
        self.pids = _FORK.Array("q", 8, lock=False)  # of workers, by number
        self.at = Saved()
        self.waits = False  # a state, for iter()
        self.goes_on = False  # the next epoch is the rest of one
        self.engine = 0  # number of those that workers belong to
        self.doomed = False  # an error is due, or a worker that has died was no longer needed
        self.iterator: Any = None
        self.before: Any = None  # an iterator that was left while it was in the middle of something
        self.data: Any = None
        self.fresh(case.workers)

    # --- loaders -------------------------------------------------------------------------------------------

    def fresh(self, workers: int) -> None:
        """Make another loader in this one's place."""
        self.drop()
        self.warns = ""
        self.case = replace(self.case, workers=workers)
        if self.data is None or self.case.streams:  # a stream that is taken up begins where it does
            self.data = data_of(self.case, self.folder / "files")
        if isinstance(self.data, Data):
            self.data.die = DEATHS.get(self.death)
            if self.case.fault.startswith("killed") and not self.death:
                self.data.strikes = False
        more: dict[str, Any] = {}
        if workers > 0:
            more.update(timeout=TIMEOUT_S, host_memory_budget=self.budget)
            if self.case.kind == "process":
                more["worker_init_fn"] = self._note
        if self.death == "hang":
            more["hang_timeout"] = HANG_S

        def make(data: Any, **given: Any) -> Any:
            return minato_gpu.DataLoader(data, **{**given, **more})

        case = replace(self.case, interruption="saved")  # with keys that can be stored
        self.loader = loaders_of(case, self.data, self.folder, Outcome(), make)[0]

    def _note(self, worker: int) -> None:
        self.pids[worker] = os.getpid()

    def drop(self) -> None:
        """Let go of the loader and what it is at."""
        self.iterator = self.before = self.loader = None
        self.got: list[Any] = []
        self.held: dict[int, Any] = {}  # batches that came a while ago: they must not change
        self.doomed = False
        self.engine += 1

    def replaced(self, how: str) -> None:
        """Put a copy, or what comes of a pickle, in the loader's place."""
        self.leave()
        made = copy.copy(self.loader) if how == "copy" else _through_pickle(self.loader)
        self.drop()
        self.loader = made
        if not self.waits:
            self.goes_on = False
            self.at = replace(self.at, ended=True, drawn=self.at.drawn and self.case.stay != "persistent")

    def restore(self, saved: Saved, workers: int, *, same: bool) -> None:
        """Let a new loader, or the same one, go on from what was saved."""
        if same:
            self.leave()
        else:
            self.fresh(workers)
        if self.case.sampler == "distributed":
            self.loader.sampler.set_epoch(saved.told)
        self.loader.load_state_dict(saved.state)
        told = saved.told if saved.ended else saved.order  # of which the state tells the sampler
        self.at, self.waits, self.goes_on = replace(saved, told=told), True, not saved.ended

    # --- epochs --------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler of an epoch. If a state of another is waiting, that is given up, with a warning."""
        self.loader.sampler.set_epoch(epoch)
        if self.goes_on and epoch != self.at.told:
            self.goes_on, self.warns = False, "has been called since"
        self.at = replace(self.at, told=epoch)
        drawn = self.case.workers > 0 or self.case.batch is None or any(part.got for part in self.at.parts)
        if not drawn:
            self.at = replace(self.at, order=epoch)  # which is drawn with the first batch

    def begin(self) -> None:
        """Call ``iter()``; an iterator that is there already is left when the new one has been made."""
        if self.iterator is not None:
            self._check(self.part())
            self.before, self.iterator = self.iterator, None
        if not self.goes_on:
            if self.case.stay == "persistent" and (self.at.died or self.doomed or self.before is not None):
                self.at = replace(self.at, drawn=False)  # not by the workers that persist: with another seed
            self.at = replace(self.at, epoch=self.at.epoch + 1, order=self.at.told, parts=(), ended=False, died=False)
        self.goes_on = False
        if self.case.stay == "an epoch":
            self.doomed = False
            self.engine += 1
        self.got, self.held = [], {}
        with warnings.catch_warnings():
            if self.warns:
                warnings.filterwarnings("ignore", f".*{self.warns}")
            self.iterator = iter(self.loader)
        self.before, self.waits, self.warns = None, False, ""

    def take(self, count: int) -> bool:
        """Take batches, as many as there are; whether the epoch goes on."""
        if self.iterator is None:
            self.begin()
        for _ in range(count):
            try:
                batch = next(self.iterator)
            except StopIteration:
                part = replace(self.part(), step=Step(self.at.epoch))
                self._check(part)
                self.at = replace(self.at, parts=(*self.at.parts, part), ended=True)
                self.iterator = None
                return False
            except Exception as error:
                if self.doomed and isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
                    part = self.part()
                    self._check(part)
                    self.at = replace(self.at, parts=(*self.at.parts, part), died=True)
                    self.iterator, self.doomed = None, False
                    return False
                self.got.append(Raised.of(error))
            else:
                if len(self.got) % 2 == 0:
                    self.held[len(self.got)] = batch
                self.got.append(samples_of(self.case, batch)[0])
            if len(self.got) > MOST:
                raise WrongError("the epoch does not end")
        self._check(self.part())
        return True

    def leave(self) -> None:
        """Leave the loop."""
        if self.iterator is not None:
            part = self.part()
            self._check(part)
            self.at = replace(self.at, parts=(*self.at.parts, part))
            self.iterator = None

    def save(self, ahead: int = 0) -> Saved:
        """The state now; the last ``ahead`` batches count as not delivered."""
        state = stored(self.loader.state_dict(**({"ahead": ahead} if ahead else {})))
        if self.iterator is None:
            return replace(self.at, state=state)
        part = self.part(ahead)
        return replace(self.at, state=state, parts=(*self.at.parts, part))

    def part(self, ahead: int = 0) -> Part:
        """What the loader at hand has delivered of the epoch."""
        for number, batch in self.held.items():
            self.got[number] = samples_of(self.case, batch)[0]
        end = len(self.got) - ahead
        step = Step(self.at.epoch, end, "save")
        return Part(step, 0, got=self.got[:end], stats=self.loader.stats(), undone=self.got[end:])

    def _check(self, part: Part) -> None:
        if self.checks:
            check(self.case, self.at, part)


# --- what must come ----------------------------------------------------------------------------------------


def check(case: Case, at: Saved, part: Part) -> None:
    """Raises WrongError where the last part of an epoch, or all of it, is not what must come."""
    if found := _differences(replace(case, interruption="saved"), at, part):
        raise WrongError("\n".join(found[:5]))


def _differences(case: Case, at: Saved, part: Part) -> list[str]:
    parts = [each for each in (*at.parts, part) if each.got or each is part]
    order = orders(case, 0)[at.order if case.sampler == "distributed" else at.epoch]
    whole = part.step.take is None
    found = [*oracle.of_content(case, part), *counts_of_part(case, part)]
    if part.got or whole:
        again = sum(bool(before.got) and isinstance(before.got[-1], Raised) for before, _ in pairwise(parts))
        took = sum(len(each.got) for each in parts) - again
        last = part if whole else replace(part, step=Step(at.epoch, took, "leave"))
        found += oracle.of_epoch(case, order, [*parts[:-1], last])
    if case.lateness > 0 and not case.streams and not case.fails:
        found += oracle.of_lateness(
            case, order, [[sample.key for sample in batch] for each in parts for batch in each.batches]
        )
    if whole and not at.died:
        found += counts_of_epoch(case, order, parts, set())
    due = _due_draws(case) if at.drawn else None
    if due is not None:
        found += oracle.of_drawn(case, Outcome(parts), due)
    return found


def _due_draws(case: Case) -> Drawn | None:
    by = None if case.workers == 0 and case.data != "pipeline" else oracle.reference(case)
    return None if by is None else _draws_of(by[0])


@functools.cache
def _draws_of(case: Case) -> Drawn:
    with tempfile.TemporaryDirectory() as folder:
        return oracle.draws(case, run(case, with_files(Path(folder))))


def with_files(folder: Path) -> Path:
    """The folder, in which the files of the data set now lie."""
    (folder / "files").mkdir()
    written(folder / "files")
    return folder


def _through_pickle(loader: Any) -> Any:
    """A loader from the pickle of another; what shares memory with workers, and functions, stay what they are."""
    kept: list[Any] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not isinstance(value, (Data, types.FunctionType, types.MethodType)):
                return None
            kept.append(value)
            return len(kept) - 1

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: Any) -> Any:
            return kept[number]

    file = io.BytesIO()
    Pickler(file).dump(loader)
    file.seek(0)
    return Unpickler(file).load()


def send(pid: int, number: int) -> None:
    """Send a signal, unless the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
