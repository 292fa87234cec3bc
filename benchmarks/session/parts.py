"""The parts that compare loaders: ``tune``, ``rates``, ``training``, ``cores``, ``light``, ``memory``.

Every run is in a process of its own, loaders take turns, and no run begins that would not end in time. A row is told
when it is known, and again when it is known better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from benchmarks import report
from benchmarks.isolate import MeasurementError, isolated
from benchmarks.session import loaders, measure, steps
from benchmarks.session.asked import Asked
from benchmarks.session.loaders import Contender, Ours
from benchmarks.session.measure import Run
from benchmarks.session.record import NO_TIME, Row, Rows
from benchmarks.session.rows import summary
from benchmarks.session.settings import Settings
from benchmarks.session.work import MIXED, SMALL

DEVICE_BUDGET = 500_000_000
"""Bytes of the second run of ``memory``: three batches of 256 photographs; what DALI works with comes on top."""

CORES = (4, 8)
"""What a server of eight GPUs has for each of them."""

_START_S = 60.0  # what a run may take beside what is timed
_USUAL_START_S = 6.0  # what it takes: a context, libraries, workers, graphs
_SLOW = 0.5  # of the best peer's rate: one that is tuned and slower is not measured any more


# --- tune --------------------------------------------------------------------------------------------------------


def tune(asked: Asked) -> Iterator[Row]:
    """The settings of each peer and of the hybrid, without a step. All take turns, one try each: what is faster is
    kept, and everybody is tuned for as long as the others."""
    changes = loaders.changes(quick=asked.settings.quick)
    here: list[_Tuned] = []
    for base in (hybrid(asked.settings), *loaders.peers(asked.settings).values()):
        if loaders.available(base):
            here.append(_Tuned(base, ({}, *changes.get(base.name, ()))))
        else:
            yield _missing(base)
    longest = _USUAL_START_S + asked.settings.warm_s + asked.settings.tried_s
    for number in range(max(len(one.changes) for one in here)):
        for one in here:
            if number >= len(one.changes) or one.lost:
                continue
            if not asked.time_for(longest):
                if not one.tried:
                    yield {"name": one.base.name, "missing": NO_TIME}
                continue
            began = perf_counter()
            one.attempt(number, lambda contender: _run(asked, contender, MIXED, steps.EMPTY, asked.settings.tried_s))
            longest = max(longest, perf_counter() - began)
            yield one.row()


class _Tuned:
    """A contender's best settings so far, and all that were tried."""

    def __init__(self, base: Contender, changes: Sequence[Mapping[str, Any]]) -> None:
        self.base, self.changes = base, changes
        self.tried: Rows = []
        self._best: Row | None = None

    @property
    def lost(self) -> bool:
        """Whether not even its usual settings work, and there are no others that were not tried twice."""
        return len(self.tried) >= 2 and self._best is None

    def attempt(self, number: int, run: Callable[[Contender], Run]) -> None:
        """Try a change of the best settings."""
        best = self.base.settings() if self._best is None else self._best["loader_settings"]
        contender = changed(self.base, {**best, **self.changes[number]})
        row: Row = {"loader_settings": contender.settings()}
        self.tried.append(row)
        try:
            row["samples_per_s"] = run(contender).samples_per_s
        except MeasurementError as error:
            row["error"] = short(error)
            report.progress(f"tune, {contender} failed:\n{error}")
            return
        report.progress(f"tune, {contender}: {row['samples_per_s']:.0f} samples/s")
        if self._best is None or row["samples_per_s"] > self._best["samples_per_s"]:
            self._best = row

    def row(self) -> Row:
        """The best, or the last error."""
        return {"name": self.base.name, **(self._best or self.tried[-1]), "tried": self.tried}


def hybrid(settings: Settings) -> Ours:
    """This loader with both lanes, as it is before anything was tried."""
    return loaders.ours(settings.workers)[2]


def chosen(asked: Asked, base: Contender) -> Contender:
    """The contender with the settings that ``tune`` has found; as it is where that has not run, or nothing worked."""
    found = asked.row("tune", base.name)
    return base if found is None else changed(base, found["loader_settings"])


def chosen_ours(asked: Asked) -> tuple[Ours, Ours, Ours]:
    """The three kinds of this loader with the settings that were found for the hybrid."""
    found = asked.row("tune", "hybrid")
    settings = {} if found is None else {k: v for k, v in found["loader_settings"].items() if k in Ours.TUNED}
    cpu, device, both = (replace(each, **settings) for each in loaders.ours(asked.settings.workers))
    return cpu, device, both


def chosen_peers(asked: Asked) -> list[Contender]:
    """The peers with the settings that were found, fastest first; as they are where they were not tuned."""
    rates = {name: _tuned_rate(asked, name) for name in loaders.peers(asked.settings)}
    bases = sorted(loaders.peers(asked.settings).values(), key=lambda base: -(rates[base.name] or 0.0))
    return [chosen(asked, base) for base in bases]


def _tuned_rate(asked: Asked, name: str) -> float | None:
    row = asked.row("tune", name)
    return None if row is None else float(row["samples_per_s"])


def changed(base: Contender, settings: Mapping[str, Any]) -> Contender:
    """The contender with other settings."""
    found: Contender = replace(base, **settings)  # type: ignore[type-var]
    return found


# --- comparisons -------------------------------------------------------------------------------------------------


def rates(asked: Asked) -> Iterator[Row]:
    """All photographs, no step: how fast each loader is. ``hybrid_of_sum`` is in the targets."""
    return _compared(asked, chosen_peers(asked), MIXED, steps.EMPTY)


def training(asked: Asked) -> Iterator[Row]:
    """All photographs, ResNet-50."""
    return _compared(asked, chosen_peers(asked), MIXED, steps.TRAINING)


def light(asked: Asked) -> Iterator[Row]:
    """Small photographs, ResNet-50: the CPU lane alone should do."""
    return _compared(asked, chosen_peers(asked)[: 1 if asked.settings.quick else 2], SMALL, steps.TRAINING)


def cores(asked: Asked) -> Iterator[Row]:
    """All photographs, no step, on as few cores as a server of many GPUs has for each; one run each."""
    cpu, _, both = chosen_ours(asked)
    for count in CORES:
        settings = asked.settings.on_cores(count)
        few = replace(asked, settings=settings)
        peers = [_fitted(each, count) for each in _fast(asked, chosen_peers(asked))[:2]]
        ours = [replace(each, workers=settings.workers) for each in (both, cpu)]
        for row in _turns(few, [*ours, *peers], MIXED, steps.EMPTY, _runner(few, MIXED, steps.EMPTY), 1):
            yield {**row, "name": f"{row['name']}, {count} cores", "cores": count}


def _fitted(peer: Contender, count: int) -> Contender:
    """With no more workers or threads than there are cores."""
    limits = {name: min(int(value), count) for name, value in peer.settings().items() if name in ("workers", "threads")}
    return changed(peer, limits)


def memory(asked: Asked) -> Iterator[Row]:
    """The device's memory that a loader takes, its ready batches included, beyond what was in use without one."""
    settings, both = asked.settings, chosen_ours(asked)[2]
    bounded = replace(both, name="hybrid, budget", device_memory_budget=DEVICE_BUDGET)
    dali = [each for each in chosen_peers(asked) if each.name == "dali"]

    def one(contender: Contender) -> Run:
        return isolated(
            measure.memory,
            settings,
            contender,
            MIXED,
            timeout_s=asked.limit_s(_START_S + settings.timed_s),
            settle_s=settings.settle_s,
        )

    return _turns(asked, [both, bounded, *dali], MIXED, steps.EMPTY, one, 1)


def _compared(asked: Asked, peers: Sequence[Contender], which: str, step: str) -> Iterator[Row]:
    """This loader by its lanes beside its peers, in the order of what is most worth knowing."""
    cpu, device, both = chosen_ours(asked)
    fast = _fast(asked, peers)
    turns = [both, *fast[:1], cpu, *([] if which == SMALL else [device]), *fast[1:]]
    for each in peers:
        if each not in turns:
            why = f"less than {_SLOW:g} of the best peer's rate when it was tuned"
            yield {**_head(asked, each, which, step), "missing": why}
    yield from _turns(asked, turns, which, step, _runner(asked, which, step), asked.settings.repetitions)


def _fast(asked: Asked, peers: Sequence[Contender]) -> list[Contender]:
    """Those that were not found to be slow; all of them at toy size."""
    best = max((_tuned_rate(asked, each.name) or 0.0 for each in peers), default=0.0)
    slow = 0.0 if asked.settings.quick else _SLOW * best
    return [each for each in peers if (_tuned_rate(asked, each.name) or best) >= slow]


def _runner(asked: Asked, which: str, step: str) -> Callable[[Contender], Run]:
    return lambda contender: _run(asked, contender, which, step, asked.settings.timed_s)


def _run(asked: Asked, contender: Contender, which: str, step: str, timed_s: float) -> Run:
    return isolated(
        measure.run,
        asked.settings,
        contender,
        which,
        step,
        timed_s,
        timeout_s=asked.limit_s(_START_S + timed_s),
        settle_s=asked.settings.settle_s,
    )


@dataclass
class _Turn:
    """A contender's runs so far."""

    contender: Contender
    runs: list[Run]
    error: str | None = None

    @property
    def name(self) -> str:
        return self.contender.name


def _turns(
    asked: Asked,
    contenders: Sequence[Contender],
    which: str,
    step: str,
    one: Callable[[Contender], Run],
    repetitions: int,
) -> Iterator[Row]:
    """Rows of contenders that take turns, while there is time for the longest run so far. One that fails before it has
    a figure is not asked again."""
    turns = [_Turn(each, []) for each in contenders if loaders.available(each)]
    yield from (_missing(each) for each in contenders if not loaders.available(each))
    usual = asked.settings
    longest = _USUAL_START_S + usual.warm_s + usual.timed_s + (0.0 if step == steps.EMPTY else 2 * usual.resident_s)
    for repetition in range(repetitions):
        for turn in turns:
            if turn.error is not None and not turn.runs:
                continue
            head = _head(asked, turn.contender, which, step)
            if not asked.time_for(longest):
                if not repetition:
                    yield {**head, "missing": NO_TIME}
                continue
            began = perf_counter()
            _take(turn, one, f"{which} photographs, step {step}, {repetition + 1}/{repetitions}, {turn.name}")
            longest = max(longest, perf_counter() - began)
            yield {**head, **summary(turn.runs), **({} if turn.error is None else {"error": turn.error})}


def _take(turn: _Turn, one: Callable[[Contender], Run], where: str) -> None:
    try:
        turn.runs.append(one(turn.contender))
    except MeasurementError as error:
        turn.error = short(error)
        report.progress(f"{where} failed:\n{error}")
    else:
        found = turn.runs[-1]
        report.progress(f"{where}: {found.samples_per_s:.0f} samples/s, step {1e3 * found.step_s:.2f} ms")


def _head(asked: Asked, contender: Contender, which: str, step: str) -> Row:
    return {
        "name": contender.name,
        "batch": asked.settings.batch,
        "photographs": which,
        "step": step,
        "loader_settings": contender.settings(),
        "tuned": _tuned_rate(asked, "hybrid" if isinstance(contender, Ours) else contender.name) is not None,
    }


def _missing(contender: Contender) -> Row:
    return {"name": contender.name, "missing": f"{contender.package} is not installed"}


def short(error: object) -> str:
    """The end of an error, where its last line says what was wrong."""
    return str(error)[-2000:]
