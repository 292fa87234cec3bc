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
from benchmarks.isolate import MeasurementError, excerpt
from benchmarks.session import loaders, measure, steps
from benchmarks.session.loaders import Contender, Ours
from benchmarks.session.measure import Run, summary
from benchmarks.session.record import NO_TIME, Row, Rows
from benchmarks.session.settings import Request, Settings
from benchmarks.session.work import MIXED, SMALL
from minato_gpu.engine import builder

DEVICE_BUDGET = 500_000_000
"""Bytes of the second run of ``memory``: three batches of 256 photographs; what DALI works with comes on top."""

CORES = (4, 8)
"""What a server of eight GPUs has for each of them."""

_START_S = 60.0  # what a run may take beside what is timed
_USUAL_START_S = 6.0  # what it takes: a context, libraries, workers, graphs
_SLOW = 0.5  # of the best peer's rate: one that is tuned and slower is not measured any more


# --- tune --------------------------------------------------------------------------------------------------------


def tune(request: Request) -> Iterator[Row]:
    """The settings of each peer and of the hybrid, without a step. All take turns, one try each: what is faster is
    kept, and everybody is tuned for as long as the others."""
    changes = loaders.changes(quick=request.settings.quick)
    here: list[_Tuned] = []
    for base in (hybrid(request.settings), *loaders.peers(request.settings).values()):
        if loaders.available(base):
            here.append(_Tuned(base, ({}, *changes.get(base.name, ()))))
        else:
            yield _missing(base)
    longest = 0.0
    for number in range(max(len(one.changes) for one in here)):
        for one in here:
            if number >= len(one.changes) or one.hopeless:
                continue
            usual_s = _usual_s(request.settings, one.base)
            if not request.time_for(max(longest, usual_s + request.settings.tried_s)):
                if not one.tried:
                    yield {"name": one.base.name, "missing": NO_TIME}
                continue
            began = perf_counter()
            one.attempt(number, lambda each: _run(request, each, MIXED, steps.EMPTY, request.settings.tried_s))
            longest = max(longest, perf_counter() - began)
            yield one.row()


class _Tuned:
    """A contender's best settings so far, and all that were tried."""

    def __init__(self, base: Contender, changes: Sequence[Mapping[str, Any]]) -> None:
        self.base, self.changes = base, changes
        self.tried: Rows = []
        self._best: Row | None = None

    @property
    def hopeless(self) -> bool:
        """Whether its first two settings have failed."""
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
            row["error"] = excerpt(str(error))
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


def chosen(request: Request, base: Contender) -> Contender:
    """The contender with the settings that ``tune`` has found; as it is where that has not run, or nothing worked."""
    found = request.row("tune", base.name)
    return base if found is None else changed(base, found["loader_settings"])


def chosen_ours(request: Request) -> tuple[Ours, Ours, Ours]:
    """The three kinds of this loader with the settings that were found for the hybrid."""
    found = request.row("tune", "hybrid")
    settings = {} if found is None else {k: v for k, v in found["loader_settings"].items() if k in Ours.TUNED}
    cpu, device, both = (replace(each, **settings) for each in loaders.ours(request.settings.workers))
    return cpu, device, both


def chosen_peers(request: Request) -> list[Contender]:
    """The peers with the settings that were found, fastest first; as they are where they were not tuned."""
    rates = {name: _tuned_rate(request, name) for name in loaders.peers(request.settings)}
    bases = sorted(loaders.peers(request.settings).values(), key=lambda base: -(rates[base.name] or 0.0))
    return [chosen(request, base) for base in bases]


def _tuned_rate(request: Request, name: str) -> float | None:
    row = request.row("tune", name)
    return None if row is None else float(row["samples_per_s"])


def changed(base: Contender, settings: Mapping[str, Any]) -> Contender:
    """The contender with other settings."""
    found: Contender = replace(base, **settings)  # type: ignore[type-var]
    return found


# --- comparisons -------------------------------------------------------------------------------------------------


def rates(request: Request) -> Iterator[Row]:
    """All photographs, no step: how fast each loader is. ``hybrid_of_sum`` is in the targets."""
    return _compared(request, chosen_peers(request), MIXED, steps.EMPTY)


def training(request: Request) -> Iterator[Row]:
    """All photographs, ResNet-50."""
    return _compared(request, chosen_peers(request), MIXED, steps.TRAINING)


def light(request: Request) -> Iterator[Row]:
    """Small photographs, ResNet-50: the CPU lane alone should do."""
    return _compared(request, chosen_peers(request)[: 1 if request.settings.quick else 2], SMALL, steps.TRAINING)


def cores(request: Request) -> Iterator[Row]:
    """All photographs, no step, on as few cores as a server of many GPUs has for each; one run each."""
    cpu, _, both = chosen_ours(request)
    best, *others = _fast(request, chosen_peers(request))[:2]
    for each in (both, best, cpu, *others):
        for count in CORES:
            few = replace(request, settings=request.settings.on_cores(count))
            fitted = _fitted(each, count, few.settings.workers)
            for row in _turns(few, [[fitted]], MIXED, steps.EMPTY, _runner(few, MIXED, steps.EMPTY)):
                yield {**row, "name": f"{row['name']}, {count} cores", "cores": count}


def _fitted(contender: Contender, count: int, workers: int) -> Contender:
    """With so many workers, or as many threads as there are cores."""
    limits = {"workers": workers, "threads": count}
    return changed(contender, {name: limits[name] for name in contender.settings() if name in limits})


def memory(request: Request) -> Iterator[Row]:
    """The device's memory that a loader takes, its ready batches included, beyond what was in use without one."""
    settings, both = request.settings, chosen_ours(request)[2]
    bounded = replace(both, name="hybrid, budget", device_memory_budget=DEVICE_BUDGET)
    dali = [each for each in chosen_peers(request) if each.name == "dali"]

    def one(contender: Contender) -> Run:
        return request.isolated(_START_S + settings.timed_s, measure.memory, settings, contender, MIXED)

    return _turns(request, [[both, bounded, *dali]], MIXED, steps.EMPTY, one)


def _compared(request: Request, peers: Sequence[Contender], which: str, step: str) -> Iterator[Row]:
    """This loader by its lanes beside its peers, in the order of what is most worth knowing."""
    cpu, device, both = chosen_ours(request)
    fast = _fast(request, peers)
    first = [both, *fast[:1], cpu, *([] if which == SMALL else [device])]
    for each in peers:
        if each not in fast:
            why = f"less than {_SLOW:g} of the best peer's rate when it was tuned"
            yield {**_head(request, each, which, step), "missing": why}
    # claims stand on the first, and an interval on two repetitions
    rounds = [first, first, fast[1:], *([[*first, *fast[1:]]] * (request.settings.repetitions - 2))]
    if request.settings.repetitions == 1:
        rounds = [[*first, *fast[1:]]]
    yield from _turns(request, rounds, which, step, _runner(request, which, step))


def _fast(request: Request, peers: Sequence[Contender]) -> list[Contender]:
    """Those that were not found to be slow; all of them at toy size."""
    best = max((_tuned_rate(request, each.name) or 0.0 for each in peers), default=0.0)
    slow = 0.0 if request.settings.quick else _SLOW * best
    return [each for each in peers if (_tuned_rate(request, each.name) or best) >= slow]


def _runner(request: Request, which: str, step: str) -> Callable[[Contender], Run]:
    return lambda contender: _run(request, contender, which, step, request.settings.timed_s)


def _run(request: Request, contender: Contender, which: str, step: str, timed_s: float) -> Run:
    return request.isolated(_START_S + timed_s, measure.run, request.settings, contender, which, step, timed_s)


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
    request: Request,
    rounds: Sequence[Sequence[Contender]],
    which: str,
    step: str,
    one: Callable[[Contender], Run],
) -> Iterator[Row]:
    """Rows of contenders that take turns in rounds, while there is time for the longest run so far. One that fails
    before it has a figure is not run again."""
    turns = {each.name: _Turn(each, []) for contenders in rounds for each in contenders}
    for name in [name for name, turn in turns.items() if not loaders.available(turn.contender)]:
        yield _missing(turns.pop(name).contender)
    longest, usual = 0.0, request.settings
    timed_s = usual.timed_s + (0.0 if step == steps.EMPTY else 2 * usual.resident_s)
    for turn in [turns[each.name] for contenders in rounds for each in contenders if each.name in turns]:
        if turn.error is not None and not turn.runs:
            continue
        head = _head(request, turn.contender, which, step)
        if not request.time_for(max(longest, _usual_s(usual, turn.contender) + timed_s)):
            if not turn.runs:
                yield {**head, "missing": NO_TIME}
            continue
        began = perf_counter()
        _take(turn, one, f"{which} photographs, step {step}, {turn.name}, {len(turn.runs) + 1}")
        longest = max(longest, perf_counter() - began)
        yield {**head, **summary(turn.runs), **({} if turn.error is None else {"error": turn.error})}


def _usual_s(settings: Settings, contender: Contender) -> float:
    """What a run takes before the clock begins; a device lane may open sooner."""
    return _USUAL_START_S + max(settings.warm_s, settings.opening_s if _has_device(contender) else 0.0)


def _has_device(contender: Contender) -> bool:
    return isinstance(contender, Ours) and "device" in contender.lanes


def _take(turn: _Turn, one: Callable[[Contender], Run], where: str) -> None:
    try:
        turn.runs.append(one(turn.contender))
    except MeasurementError as error:
        turn.error = excerpt(str(error))
        report.progress(f"{where} failed:\n{error}")
    else:
        found = turn.runs[-1]
        report.progress(f"{where}: {found.samples_per_s:.0f} samples/s, step {1e3 * found.step_s:.2f} ms")


def _head(request: Request, contender: Contender, which: str, step: str) -> Row:
    """``tries``: how many settings were tried for it; ``dali_threads``: of a device lane here, also by itself."""
    return {
        "name": contender.name,
        "batch": request.settings.batch,
        "photographs": which,
        "step": step,
        "loader_settings": contender.settings(),
        "tries": _tries(request, "hybrid" if isinstance(contender, Ours) else contender.name),
        **({"dali_threads": builder.THREADS_BESIDE} if _has_device(contender) else {}),
    }


def _tries(request: Request, name: str) -> int:
    """How many settings of a contender were tried."""
    row = request.row("tune", name)
    return 0 if row is None else len(row["tried"])


def _missing(contender: Contender) -> Row:
    return {"name": contender.name, "missing": f"{contender.package} is not installed"}
