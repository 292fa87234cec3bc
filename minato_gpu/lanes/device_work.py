"""How the device lane prepares a task: issued to its executors by split point, waited for, and reported.

A sample that fails on the device is tried once more on the CPU implementation, with the same draws, before its failure
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from minato_gpu.lanes.ahead import BuildAhead
from minato_gpu.lanes.at import At
from minato_gpu.lanes.base import Failure, Handed, Local, Part, Piece, Report, Task, failure
from minato_gpu.lanes.delay import CoreTime
from minato_gpu.lanes.device import DeviceExecutor
from minato_gpu.lanes.outlet import Issued, Outlet
from minato_gpu.lanes.store import Store
from minato_gpu.memory.accelerator import is_out_of_memory
from minato_gpu.memory.board import Claim
from minato_gpu.pipeline import Pipeline
from minato_gpu.samples import Origin, StageError, explain, sample_seed


@dataclass
class _Part:
    """The samples of a task that came at one split point: what has been issued for them, and since when.

    ``core_s``: seconds of the cores that issuing took; ``usual``: nothing was built or repeated for it.
    """

    split: int
    numbers: list[int]
    issued: Issued
    begin: float
    core_s: float
    usual: bool


class Run:
    """A task under way: what is known of its samples so far."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.tickets = [(piece, at) for piece in task.pieces for at in range(len(piece.keys))]
        self.parts: list[_Part] = []
        self.items: list[Any] = [None] * len(self.tickets)
        self.times = [0.0] * len(self.tickets)
        self.begin = perf_counter()
        self.usual = True
        self.repeated = 0


class DeviceWork:
    """For one thread. ``executors`` by split point, which show in ``at`` what they do; ``waits``: a task is waited for
    before the next one is begun; ``ahead``: builds graphs ahead of need; ``no_memory``: told where there is no memory
    for even one sample."""

    def __init__(
        self,
        pipeline: Pipeline,
        executors: dict[int, DeviceExecutor],
        at: At,
        store: Store,
        outlet: Outlet,
        *,
        waits: bool,
        ahead: BuildAhead | None,
        no_memory: Callable[[Exception], None],
    ) -> None:
        self._pipeline = pipeline
        self._first = pipeline.host_prefix
        self._executors = executors
        self._at = at
        self._task: Task | None = None  # the one that is begun or waited for
        self._numbers: list[int] = []  # which of its samples the executor was given
        self._store = store
        self._outlet = outlet
        self._waits = waits
        self.ahead = ahead
        self._no_memory = no_memory
        self._through = 0.0  # when the last part was through
        self._repeated = 0  # samples of the current task that ran a second time, on the CPU
        self._looked = 0  # graphs built when their threads were last looked for

    def at_work(self) -> tuple[float, Claim] | None:
        """From another thread: since when this one has been at its current step, and what that is."""
        task, step, numbers = self._task, self._at.step, self._numbers
        if task is None:
            return None
        sample = self._at.number(step)
        started = 0 if sample is None or sample >= len(numbers) else numbers[sample] + 1
        return step.since, Claim(task.run, task.chunk, started, step.stage + 1)

    @property
    def together(self) -> int:
        """How many samples the current step is at, at once."""
        return self._at.step.samples

    def begin(self, task: Task, cores: CoreTime) -> Run:
        """Issue all of a task; what has a device to wait for is not waited for, unless nothing else could be begun."""
        run = Run(task)
        self._at.enter()
        self._task, self._repeated = task, 0
        self._look(cores)
        for split, numbers in self._by_split(run.tickets).items():
            begin, used, builds = perf_counter(), cores(), self._executors[split].builds
            chosen = [run.tickets[number] for number in numbers]
            try:
                issued = self._issue(task, chosen, numbers, split)
            except Exception as error:  # not a sample's own: every ticket says what happened, and the lane goes on
                issued = Issued([self._failure(task, piece, at, error) for piece, at in chosen])
            usual = self._executors[split].builds == builds and self._repeated == 0
            run.parts.append(_Part(split, numbers, issued, begin, cores() - used, usual))
            if self._waits:
                self._settle(run, run.parts[-1])
        run.repeated = self._repeated
        self._task = None
        return run

    def _settle(self, run: Run, part: _Part) -> None:
        """Wait until the device is through with the part."""
        chosen = [run.tickets[number] for number in part.numbers]
        try:
            found = self._outlet.settle(part.issued)
        except Exception as error:
            found = [self._failure(run.task, piece, at, error) for piece, at in chosen]
        now = perf_counter()
        took = now - max(part.begin, self._through)  # it may have been issued while the device was at another
        self._through = now
        if self._executors[self._first].device == "cpu":  # what it waited for a core is not the sample's cost
            took = min(max(part.core_s, 1e-6), took)
        for number, item in zip(part.numbers, found, strict=True):
            run.items[number], run.times[number] = item, took / len(chosen)
        run.usual = run.usual and part.usual
        if self.ahead is not None:
            self.ahead.ran(part.split)

    def end(self, run: Run, cores: CoreTime) -> Report:
        """Wait for the task, and report it."""
        begin = run.begin
        if not self._waits:
            self._at.enter(samples=len(run.tickets))
            self._task, self._numbers = run.task, []
            begin = max(begin, self._through)
            for part in run.parts:
                self._settle(run, part)
        self._task = None
        end = self._through = perf_counter()
        self._look(cores, repeated=run.repeated > 0)
        parts: list[Part | None] | None = None
        if run.usual and self._pipeline.cuts:
            known = zip(run.tickets, run.times, strict=True)
            parts = [(_split(*ticket, self._first), (each,)) for ticket, each in known]
        return Report(
            run=run.task.run,
            chunk=run.task.chunk,
            worker=0,
            first=0,
            done=len(run.tickets),
            seconds=end - begin,
            begin=begin,
            end=end,
            final=True,
            nbytes=sum(item.nbytes for item in run.items if isinstance(item, Local)),
            items=run.items if any(item is not None for item in run.items) else None,
            times=run.times if run.usual else None,
            parts=parts,
            layout=self._learned(),
            repeated=run.repeated,
        )

    def _look(self, cores: CoreTime, *, repeated: bool = False) -> None:
        """Graphs that have been built, here or ahead, have brought threads of their own."""
        builds = sum(executor.builds for executor in self._executors.values())
        if builds != self._looked or repeated:
            self._looked = builds
            cores.look()

    def _learned(self) -> bytes | None:
        """What a sample looks like, to be reported once."""
        layout, self._outlet.layout = self._outlet.layout, None
        return layout

    def _by_split(self, tickets: list[tuple[Piece, int]]) -> dict[int, list[int]]:
        """The tickets' numbers by the split point at which they come."""
        found: dict[int, list[int]] = {}
        for number, ticket in enumerate(tickets):
            found.setdefault(_split(*ticket, self._first), []).append(number)
        return found

    def _issue(self, task: Task, tickets: list[tuple[Piece, int]], numbers: list[int], split: int) -> Issued:
        executor = self._executors[split]
        items: list[Any] = [self._known_failure(piece, at) for piece, at in tickets]
        ready = [number for number, item in enumerate(items) if item is None]
        fields = [self._fields(*tickets[number], task) for number in ready]
        self._numbers = [numbers[number] for number in ready]
        if self.ahead is not None:
            self.ahead.start(fields)
        room = self._outlet.room
        if room is not None:
            executor.limit = min(executor.max_batch, max(1, room))
        with self._outlet.working():
            results = executor.run(fields, self._outlet.stream)
            for sample, (number, (given, seed), result) in enumerate(zip(ready, fields, results, strict=True)):
                piece, at = tickets[number]
                if isinstance(result, StageError):
                    result = self._by_cpu(sample, given, seed, split, result)
                    made = frozenset[str]()
                else:
                    made = executor.made
                self._at.enter(sample=sample)
                items[number] = self._finish(task, piece, at, result, made)
            self._at.enter(samples=len(items))
            return self._outlet.issued(items)

    def _known_failure(self, piece: Piece, at: int) -> Failure | None:
        assert piece.sources is not None
        source = piece.sources[at]
        return source if isinstance(source, Failure) else None

    def _fields(self, piece: Piece, at: int, task: Task) -> tuple[dict[str, Any], int]:
        assert piece.sources is not None
        occurrence = 0 if piece.occurrences is None else piece.occurrences[at]
        source = piece.sources[at]
        lying = source.fields if isinstance(source, Handed) else source
        return self._store.get(lying), sample_seed(task.seed, 0, piece.keys[at], occurrence)

    def _by_cpu(self, sample: int, fields: dict[str, Any], seed: int, split: int, error: StageError) -> Any:
        """What the CPU implementations make of a sample that failed on the device, or what they raise."""
        self._repeated += 1
        if is_out_of_memory(error):
            self._no_memory(error)
        try:
            return self._pipeline.run(
                fields, seed, start=split, before_stage=lambda stage: self._at.enter(stage, sample)
            )
        except Exception as raised:
            return raised

    def _finish(self, task: Task, piece: Piece, at: int, result: Any, made: frozenset[str]) -> Any:
        """Put a result where it belongs."""
        if isinstance(result, Exception):
            return self._failure(task, piece, at, result)
        return self._outlet.put(task, piece, at, result, made)

    def _failure(self, task: Task, piece: Piece, at: int, error: Exception) -> Failure:
        place = Origin(task.epoch, piece.position_of(at), piece.keys[at], lane="device, then cpu")
        cause, origin = explain(error, place)
        return failure(cause, f"in DataLoader device lane ({origin})", origin=origin)


def _split(piece: Piece, at: int, first: int) -> int:
    """The split point at which the ticket comes."""
    source = None if piece.sources is None else piece.sources[at]
    return source.stage if isinstance(source, Handed) else first
