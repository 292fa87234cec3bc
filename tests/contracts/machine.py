"""A machine that does to a loader and its successors, in any order, what the contract allows, and compares what comes
with what the oracle says. Hypothesis chooses; ``python -m tests.contracts.chaos`` runs it for as long as asked.

The call of a rule is a line of a program. Where something is wrong, the lines so far are one that fails by itself.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import random
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from fsspec.asyn import get_loop
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minato_gpu.util.messages import LOGGER
from tests.contracts import elsewhere
from tests.contracts.cases import FILES, Case, legal, walked
from tests.contracts.lineage import DEATHS, Lineage, Saved, send, with_files
from tests.support.leaks import Snapshot, child_pids, leaks, take_snapshot
from tests.support.waiting import wait_until

EPOCHS = 3
_ALL = 100  # more batches than an epoch has
_PAUSE_S = 0.05  # how long a process is stopped
_BUDGETS = (None, None, 1, 3_000)  # bytes; the least is less than a sample takes
_DAMAGES = ("spoilt", "shortened", "deleted", "directory deleted", "directory replaced")


@functools.cache
def cases() -> list[Case]:
    """The loaders that the machine begins with, the plainest first."""
    found = {replace(case, interruption="none", epochs=EPOCHS, ranks=1) for case in walked(20_000, _known)}
    usual = vars(Case(epochs=EPOCHS))
    return sorted(
        (case for case in found if may(case, "saved") and not case.ends_early),
        key=lambda case: (sum(value != usual[name] for name, value in vars(case).items()), str(case)),
    )


_FAULTS = ("none", "raise", "skip", "handler skips", "handler raises", "retry", "killed once", "killed twice")
AS_USUAL = ("start", "collate", "error", "most", "budget", "context", "share", "far")


def _known(case: Case) -> bool:
    """Whether the machine knows what comes: workers start and batches are joined as usual, and it sets the budget."""
    plain = all(getattr(case, name) == getattr(Case, name) for name in AS_USUAL)
    return legal(case) and plain and case.fault in _FAULTS and case.data != "closures"


def may(case: Case, interruption: str) -> bool:
    """Whether the contract promises what comes of a case that is interrupted in this way."""
    return legal(replace(case, interruption=interruption))


def _has_processes(case: Case) -> bool:
    return case.workers > 0 and (case.kind == "process" or case.data in FILES)


def _draws_once(case: Case) -> bool:
    """Whether the order of later epochs follows from when workers that persist have drawn their seed."""
    return case.stay == "persistent" and case.sampler == "shuffle=True"


def _step(
    allowed: Callable[[Machine], bool] | None = None,
    only: Callable[[Case], bool] = lambda case: True,
    **given: st.SearchStrategy[Any],
) -> Callable[[Any], Any]:
    """A rule that does nothing where it is not ``allowed``; ``only``: of such cases.

    What Hypothesis chooses must not depend on when a process happens to die, so ``allowed`` is no precondition.
    """
    as_rule: Any = rule(**given)  # type: ignore[call-overload]
    return lambda work: precondition(lambda machine: only(machine.line.case))(as_rule(_noted(work, allowed)))


def _noted(work: Callable[..., None], allowed: Callable[[Machine], bool] | None = None) -> Callable[..., None]:
    """Notes and counts the calls of a rule."""

    @functools.wraps(work)
    def noted(machine: Machine, **given: Any) -> None:
        if allowed is not None and not allowed(machine):
            return
        values = {name: given[name] for name in inspect.signature(work).parameters if name in given}
        words = (f"{name}={value if isinstance(value, Case) else repr(value)}" for name, value in values.items())
        machine.program.append(f"machine.{work.__name__}({', '.join(words)})")
        machine.counts["steps"] += 1
        with machine.watched():
            work(machine, **given)

    return noted


class Machine(RuleBasedStateMachine):
    """One loader and its successors.

    ``counts``: runs, steps and faults of all machines; ``failed``: the programs that failed.
    """

    counts: ClassVar[Counter[str]] = Counter()
    failed: ClassVar[list[list[str]]] = []
    line: Lineage
    before: Snapshot

    def __init__(self) -> None:
        super().__init__()
        self.program: list[str] = []
        self.saved: list[Saved] = []
        self.timers: list[threading.Timer] = []
        self.killed_of = 0  # the workers of which one was killed: two deaths at one sample would make it a bad one
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        self.level = LOGGER.level

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Keeps the program where it fails."""
        try:
            yield
        except Exception:
            if self.program not in self.failed:
                self.failed.append(self.program)
            raise

    @initialize(
        case=st.deferred(lambda: st.sampled_from(cases())),
        death=st.sampled_from(("", *DEATHS)),
        budget=st.sampled_from(_BUDGETS),
    )
    @_noted
    def start(self, case: Case, death: str, budget: int | None) -> None:
        """Make the first loader. Samples kill their worker once where ``death`` says how; "killed twice" always do."""
        LOGGER.setLevel(logging.CRITICAL + 1)  # every death is a warning
        self.counts["runs"] += 1
        if case.fault == "killed twice" and death in ("", "hang"):
            death = "killed"
        _warm_up()
        self.before = take_snapshot()
        death = death if case.fault.startswith("killed") else ""
        if death:
            self.counts[f"worker: {death}"] += 1
        self.line = Lineage(case, with_files(self.folder), death, budget)

    # --- epochs --------------------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Whether there is an epoch to go on with, or to begin."""
        line = self.line
        return line.iterator is not None or line.goes_on or self.begins()

    def between(self) -> bool:
        """Whether no epoch is under way."""
        return self.line.at.ended and self.line.iterator is None

    def begins(self) -> bool:
        """Whether another epoch may begin here."""
        return self.line.at.epoch + 1 < EPOCHS and (self.between() or self.may_leave())

    def may_leave(self) -> bool:
        """Whether it is known what follows an epoch that is left here: a sampler that draws may not have drawn yet."""
        line = self.line
        came = line.got or any(part.got for part in line.at.parts)
        return may(line.case, "left") and bool(came or line.case.sampler != "repeats")

    @_step(goes_on, count=st.integers(0, 6))
    def take(self, count: int) -> None:
        """Take batches."""
        self.line.take(count)

    @_step(goes_on)
    def finish(self) -> None:
        """Take batches until the epoch ends."""
        self.line.take(_ALL)

    @_step(lambda self: self.line.iterator is not None)
    def leave(self) -> None:
        """Leave the loop."""
        self.line.leave()
        self.counts["left"] += 1

    @_step(lambda self: self.line.iterator is not None and self.begins())
    def another(self) -> None:
        """Begin another epoch while one is under way."""
        self.line.begin()
        self.counts["second iterator"] += 1

    @_step(
        lambda self: self.line.iterator is None,
        lambda case: case.sampler == "distributed",
        epoch=st.integers(0, EPOCHS - 1),
    )
    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler of an epoch."""
        if self.line.goes_on and epoch != self.line.at.told and self.line.at.epoch + 1 == EPOCHS:
            return
        self.line.set_epoch(epoch)
        self.counts["set_epoch"] += 1

    # --- successors ----------------------------------------------------------------------------------------

    @_step(ahead=st.integers(0, 3))
    def save(self, ahead: int) -> None:
        """Save a state, in which the last batches count as not delivered where that can be."""
        held = 0 if self.line.iterator is None else len(self.line.got)
        self.saved.append(self.line.save(min(ahead, held) if may(self.line.case, "ahead") else 0))

    @_step(
        lambda self: bool(self.saved),
        which=st.integers(0, 9),
        workers=st.integers(1, 3),
        same=st.booleans(),
        count=st.integers(0, 6),
    )
    def load(self, which: int, workers: int, same: bool, count: int) -> None:
        """Let another loader go on from a state, or the same one, which takes batches."""
        self._clear()
        self.line.restore(self.saved[which % len(self.saved)], self._workers(workers), same=same)
        self.counts["loaded"] += 1
        self._take(count)

    @_step(
        lambda self: bool(self.saved),
        which=st.integers(0, 9),
        workers=st.integers(1, 3),
        count=st.integers(0, 6),
        killed=st.booleans(),
    )
    def elsewhere(self, which: int, workers: int, count: int, killed: bool) -> None:
        """Go on from a state in another process, which takes batches and saves, or is killed meanwhile."""
        saved = self.saved[which % len(self.saved)]
        if saved.ended and saved.epoch + 1 == EPOCHS:
            return
        self._clear()
        line = self.line
        case = replace(line.case, workers=self._workers(workers))
        found = elsewhere.run((case, self.folder, line.death, line.budget, saved, count), killed=killed)
        self.counts["program killed" if killed else "elsewhere"] += 1
        self.saved += [] if found is None else [found]

    @_step(
        lambda self: self.between() or self.line.waits or self.may_leave(),
        lambda case: not _draws_once(case),
        how=st.sampled_from(("copy", "pickle")),
        count=st.integers(0, 6),
    )
    def replaced(self, how: str, count: int) -> None:
        """Go on with a copy of the loader, or with what comes of its pickle, and take batches."""
        self.line.replaced(how)
        self.counts[how] += 1
        self._take(count)

    def _take(self, count: int) -> None:
        if count > 0 and self.goes_on():
            self.line.take(count)

    def _workers(self, wanted: int) -> int:
        """As many as are wanted, where that may be another number; not of streams, one of which may not have begun."""
        case = self.line.case
        other = not case.streams and may(case, "elsewhere") and legal(replace(case, workers=wanted))
        return wanted if other else case.workers

    # --- faults --------------------------------------------------------------------------------------------

    @property
    def processes(self) -> list[int]:
        """The processes that belong to the loader, its workers first."""
        found = [pid for pid in child_pids() if pid not in self.before.processes]
        return sorted(found, key=lambda pid: (pid not in self.line.pids, pid))

    @_step(
        lambda self: self.goes_on() and not self.line.death and self.killed_of != self.line.engine,
        lambda case: _has_processes(case) and (case.replaces or not _draws_once(case)),
        which=st.integers(0, 5),
        count=st.integers(0, 6),
    )
    def kill(self, which: int, count: int) -> None:
        """Kill a worker, the reader, or a process that forks workers, and take batches."""
        pid = self._at_work(which)
        if pid is None or self.killed_of == self.line.engine:
            return
        self.killed_of = self.line.engine
        self.line.doomed = not self.line.case.replaces
        self.counts[f"{self._kind(pid)} killed"] += 1
        send(pid, signal.SIGKILL)
        self._take(count)

    @_step(goes_on, _has_processes, which=st.integers(0, 5), count=st.integers(0, 6))
    def stop(self, which: int, count: int) -> None:
        """Stop such a process for a moment, and take batches meanwhile."""
        pid = self._at_work(which)
        if pid is None:
            return
        self.counts[f"{self._kind(pid)} stopped"] += 1
        send(pid, signal.SIGSTOP)
        self.timers.append(threading.Timer(_PAUSE_S, send, (pid, signal.SIGCONT)))
        self.timers[-1].start()
        self._take(count)

    def _at_work(self, which: int) -> int | None:
        """A process of the loader while an epoch is under way."""
        if self.line.iterator is None:
            self.line.take(1)
        pids = self.processes if self.line.iterator is not None else []
        return pids[which % len(pids)] if pids else None

    def _kind(self, pid: int) -> str:
        if pid in self.line.pids:
            return "worker"
        files, replaces = self.line.case.data in FILES, self.line.case.replaces
        return "reader or forker" if files and replaces else "reader" if files else "forker"

    @_step(None, lambda case: case.cache == "both", how=st.sampled_from(_DAMAGES), seed=st.integers(0, 99))
    def damage(self, how: str, seed: int) -> None:
        """Damage what is kept on disk, while it is in use or not."""
        cache, choose = self.folder / "cache", random.Random(seed)
        files = sorted(file for file in cache.rglob("*") if file.is_file() and file.name != "format")
        if how.startswith("directory"):
            shutil.rmtree(cache, ignore_errors=True)
            if how == "directory replaced" and not cache.exists():
                cache.touch()
        elif files:
            with contextlib.suppress(FileNotFoundError):  # the reader removes some meanwhile
                _damage(choose.choice(files), how, choose)
        self.counts[f"cache {how}"] += 1

    def _clear(self) -> None:
        """No file is in the place of the cache's directory: a loader would not be made."""
        if (cache := self.folder / "cache").is_file():
            cache.unlink()

    def teardown(self) -> None:
        """Nothing is left."""
        for timer in self.timers:
            timer.join()
        if self.program:
            self.line.drop()
        shutil.rmtree(self.folder)
        LOGGER.setLevel(self.level)
        if self.program and self.program not in self.failed:
            with self.watched():
                self.check_left()

    def check_left(self, limit_s: float = 20.0) -> None:
        """Wait until no process, thread, memory or descriptor is left."""
        if self._left():
            gc.collect()
        assert wait_until(lambda: not self._left(), limit_s), f"left behind: {'; '.join(self._left())}"

    def _left(self) -> list[str]:
        """What was not there before, but for semaphores, which are made by none of these loaders: other tests' are."""
        return [each for each in leaks(self.before) if "sem.mp-" not in each]


@functools.cache
def _warm_up() -> None:
    """Brings up what lives as long as this process."""
    get_loop()
    with tempfile.TemporaryDirectory() as folder:
        line = Lineage(Case(epochs=EPOCHS), with_files(Path(folder)))
        line.take(_ALL)
        saved = line.save()
        elsewhere.run((line.case, Path(folder), "", None, saved, 1), killed=False)


def _damage(file: Path, how: str, choose: random.Random) -> None:
    size = file.stat().st_size
    if how == "deleted":
        file.unlink()
    elif how == "shortened":
        with file.open("r+b") as opened:
            opened.truncate(choose.randint(0, size))
    elif size > 0:
        with file.open("r+b") as opened:
            opened.seek(choose.randrange(size))
            opened.write(choose.randbytes(choose.choice((1, 64, 4096)))[: size - opened.tell()])
