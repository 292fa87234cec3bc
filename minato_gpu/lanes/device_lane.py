"""The device lane: one executor in a thread of the training process, fed with what CPU workers have read.

It takes every task that waits, one micro-batch at a time, and writes finished samples into their rows of the batch.
Where they stay on a device, the next micro-batch is issued before the thread waits for the one before, so that the
device has work while the host prepares it (the stand-in on the CPU has no such two sides).
A sample that fails on the device is tried once more on the CPU implementation, with the same draws, before its
failure counts. Where not even one sample fits into the device's memory, the lane says so and retires, if there is a CPU
lane to go on alone: what it was sent goes back to the scheduler. So it does where it cannot be opened; the only lane
there is has an ``error`` instead.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from minato_gpu.lanes.ahead import BuildAhead
from minato_gpu.lanes.base import Failure, Handed, Local, Part, Piece, Report, Task, failure
from minato_gpu.lanes.delay import CoreTime
from minato_gpu.lanes.device import build_executor
from minato_gpu.lanes.links import Links
from minato_gpu.lanes.outlet import Issued, Outlet
from minato_gpu.lanes.priority import give_way
from minato_gpu.lanes.store import Store
from minato_gpu.memory.accelerator import is_out_of_memory
from minato_gpu.memory.board import ATTENTION
from minato_gpu.memory.rate import measured_rate
from minato_gpu.memory.transfers import Transfers
from minato_gpu.notices import LOGGER, say_once
from minato_gpu.pipeline import Pipeline
from minato_gpu.samples import Origin, StageError, explain, sample_seed

_USUAL_RATE = 1e9  # bytes per second
IN_FLIGHT = 2  # tasks of a device: one that it works on, one that is issued behind it


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


class _Run:
    """A task under way."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.tickets = [(piece, at) for piece in task.pieces for at in range(len(piece.keys))]
        self.parts: list[_Part] = []
        self.items: list[Any] = [None] * len(self.tickets)
        self.times = [0.0] * len(self.tickets)
        self.begin = perf_counter()
        self.usual = True
        self.repeated = 0


class DeviceLane:
    """One executor and its thread. ``threads``: DALI's threads on the CPU; ``transfers``: where batches live on a
    device, the way there; ``may_retire``: the CPU lane prepares samples too; ``name``: "device", or of several devices
    "device:n"."""

    slots = 1
    away = 0

    def __init__(
        self,
        links: Links,
        pipeline: Pipeline,
        device: str,
        micro_batch: int,
        threads: int = 1,
        transfers: Transfers | None = None,
        may_retire: bool = False,
        name: str = "device",
    ) -> None:
        self.name = name
        self._links = links
        self._pipeline = pipeline
        self._first = pipeline.host_prefix
        self._executors = {
            split: build_executor(pipeline, split, device=device, max_batch=micro_batch, threads=threads)
            for split in (self._first, *pipeline.cuts)
        }
        self._executor = self._executors[self._first]
        self._takes_parts = bool(pipeline.cuts) and may_retire  # another lane may begin with samples
        self._ahead: BuildAhead | None = None
        if self._takes_parts:
            cuts = {split: self._executors[split] for split in pipeline.cuts}
            self._ahead = BuildAhead(cuts, self._stand_back)
        self._transfers = transfers
        self.bytes_per_s = float("inf")  # of what is brought to the device; measured where parts of samples may be
        self.error: Exception | None = None  # why the lane will never open, where there is no other
        self._store = Store(-1, links, None, links.board)
        self._outlet = Outlet(self._store, transfers)
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._reports: deque[Report] = deque()
        self._arrived = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._in_flight = 1 if transfers is None else IN_FLIGHT
        self._through = 0.0  # when the last part was through
        self._repeated = 0  # samples of the current task that ran a second time, on the CPU
        self._looked = 0  # graphs built when their threads were last looked for
        self._may_retire = may_retire
        self.retired = False
        self.ready = False  # once DALI is imported; until then the CPU lane serves alone
        self._thread: threading.Thread | None = threading.Thread(target=self._main, name=f"minato-{name}", daemon=True)
        self._thread.start()

    def send(self, task: Task, worker: int = 0) -> None:
        """Queue a task; never blocks."""
        self._tasks.put(task)

    def recall(self) -> list[tuple[int, int]]:
        """Take back the tasks that have not begun; returns their (run, chunk)."""
        out = []
        try:
            while (task := self._tasks.get_nowait()) is not None:
                out.append((task.run, task.chunk))
        except queue.Empty:
            pass
        return out

    def receive(self) -> list[Report]:
        """All reports that have arrived; never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._arrived)
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def fds(self) -> list[int]:
        """Readable when there is something to receive."""
        return [self._arrived]

    def exits(self) -> list[Any]:
        """The thread does not end by itself."""
        return []

    def running_s(self, run: int, chunk: int) -> float | None:
        """A micro-batch is not looked into."""
        return None

    def revoke(self, run: int, chunk: int, keep: int) -> int | None:
        """A micro-batch is not cut."""
        return None

    def close(self, timeout: float) -> bool:
        """Wait for the micro-batch under way, then let go of graphs and memory; idempotent."""
        if self._thread is None:
            return True
        self.recall()
        self._tasks.put(None)
        self._thread.join()
        self._thread = None
        if self._ahead is not None:
            self._ahead.close()
        for executor in self._executors.values():
            executor.close()
        os.close(self._arrived)
        return True

    # --- the thread ----------------------------------------------------------------------------------------

    def _main(self) -> None:
        self._stand_back()  # and so do DALI's threads, which start from here
        cores = CoreTime("DALI")
        self._load()
        self.ready = not self.retired
        self._signal()
        runs: deque[_Run] = deque()
        closing = False
        while runs or not closing:
            try:
                task = self._tasks.get(block=not runs)
            except queue.Empty:
                self._report(self._end(runs.popleft(), cores))
                continue
            if task is None:
                closing = True
            elif self.retired:
                self._report(_refused(task))
            else:
                runs.append(self._begin(task, cores))
                if len(runs) >= self._in_flight:
                    self._report(self._end(runs.popleft(), cores))
            del task
        cores.close()

    def _report(self, report: Report) -> None:
        self._reports.append(report)
        self._signal()

    def _load(self) -> None:
        """Import what stages need. Without it the CPU's implementations prepare the samples, in the lane there is."""
        try:
            for executor in self._executors.values():
                executor.load()
        except ImportError as error:
            how = "pip install 'minato-gpu[cuda13]' (or cuda12)"
            say_once(f"the pipeline runs on the CPU alone: the device lane needs {error.name}; {how}")
            self.retired = self._may_retire
            return
        except Exception as error:
            self.retired = True
            if self._may_retire:
                LOGGER.warning("the %s lane cannot be opened; %s (%r)", self.name, self._others(), error)
            else:
                self.error = error
            return
        if self._takes_parts:
            self.bytes_per_s = self._rate()

    def _rate(self) -> float:
        """How fast values come to the device; a guess where that cannot be measured, which is no reason to stop."""
        try:
            return measured_rate(None if self._transfers is None else self._transfers.accelerator)
        except Exception as error:
            LOGGER.warning("how fast values come to the device cannot be measured: taken to be 1 GB/s (%r)", error)
            return _USUAL_RATE

    def _stand_back(self) -> None:
        """The stand-in for a GPU shares cores with workers and training."""
        if self._executor.device == "cpu":
            give_way()

    def _signal(self) -> None:
        os.eventfd_write(self._arrived, 1)
        if self._links.board.words[ATTENTION]:
            os.eventfd_write(self._links.wake, 1)

    def offers(self, split: int) -> bool:
        """Whether samples that come cut at ``split`` find everything built."""
        return self._executors[split].built and not self.retired

    def _begin(self, task: Task, cores: CoreTime) -> _Run:
        """Issue all of a task; what has a device to wait for is not waited for, unless nothing else could be begun."""
        run = _Run(task)
        self._repeated = 0
        self._look(cores)
        for split, numbers in self._by_split(run.tickets).items():
            begin, used, builds = perf_counter(), cores(), self._executors[split].builds
            chosen = [run.tickets[number] for number in numbers]
            try:
                issued = self._issue(task, chosen, split)
            except Exception as error:  # not a sample's own: every ticket says what happened, and the lane goes on
                issued = Issued([self._failure(task, piece, at, error) for piece, at in chosen])
            usual = self._executors[split].builds == builds and self._repeated == 0
            run.parts.append(_Part(split, numbers, issued, begin, cores() - used, usual))
            if self._in_flight == 1:
                self._settle(run, run.parts[-1])
        run.repeated = self._repeated
        return run

    def _settle(self, run: _Run, part: _Part) -> None:
        """Wait until the device is through with the part."""
        chosen = [run.tickets[number] for number in part.numbers]
        try:
            found = self._outlet.settle(part.issued)
        except Exception as error:
            found = [self._failure(run.task, piece, at, error) for piece, at in chosen]
        now = perf_counter()
        took = now - max(part.begin, self._through)  # it may have been issued while the device was at another
        self._through = now
        if self._executor.device == "cpu":  # what it waited for a core is not the sample's cost
            took = min(max(part.core_s, 1e-6), took)
        for number, item in zip(part.numbers, found, strict=True):
            run.items[number], run.times[number] = item, took / len(chosen)
        run.usual = run.usual and part.usual
        if self._ahead is not None and not self.retired:
            self._ahead.ran(part.split)

    def _end(self, run: _Run, cores: CoreTime) -> Report:
        """Wait for the task, and report it."""
        begin = run.begin
        if self._in_flight > 1:
            begin = max(begin, self._through)
            for part in run.parts:
                self._settle(run, part)
        end = perf_counter()
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

    def _issue(self, task: Task, tickets: list[tuple[Piece, int]], split: int) -> Issued:
        executor = self._executors[split]
        items: list[Any] = [self._known_failure(piece, at) for piece, at in tickets]
        ready = [number for number, item in enumerate(items) if item is None]
        fields = [self._fields(*tickets[number], task) for number in ready]
        if self._ahead is not None:
            self._ahead.start(fields)
        room = self._outlet.room
        if room is not None:
            executor.limit = min(executor.max_batch, max(1, room))
        with self._outlet.working():
            results = executor.run(fields, self._outlet.stream)
            for number, (given, seed), result in zip(ready, fields, results, strict=True):
                piece, at = tickets[number]
                items[number] = self._finish(task, piece, at, given, seed, result, split)
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

    def _finish(
        self, task: Task, piece: Piece, at: int, fields: dict[str, Any], seed: int, result: Any, split: int
    ) -> Any:
        """Put a result where it belongs; on failure ask the CPU implementation."""
        failed = isinstance(result, StageError)
        if failed:
            self._repeated += 1
            if is_out_of_memory(result):
                self._retire(result)
            try:
                result = self._pipeline.run(fields, seed, start=split)
            except Exception as error:
                return self._failure(task, piece, at, error)
        return self._outlet.put(task, piece, at, result, frozenset() if failed else self._executors[split].made)

    def _retire(self, error: Exception) -> None:
        """The device has no memory for even one sample."""
        if self._may_retire and not self.retired:
            self.retired = True
            what = f"the {self.name.replace(':', ' number ')} has no memory left to prepare samples"
            LOGGER.warning("%s; %s (%s)", what, self._others(), error)

    def _others(self) -> str:
        """Who goes on."""
        alone = self.name == "device"
        return "the CPU lane goes on alone" if alone else "the CPU lane and other devices go on without it"

    def stats(self) -> dict[str, Any]:
        """Counters as plain data."""
        executors = self._executors.values()
        return {
            "micro_batch": min(executor.limit for executor in executors),
            "short_of_memory": sum(executor.short_of_memory for executor in executors),
            "spilled_to_host": self._outlet.spilled,
            "retired": self.retired,
        }

    def _failure(self, task: Task, piece: Piece, at: int, error: Exception) -> Failure:
        place = Origin(task.epoch, piece.position_of(at), piece.keys[at], lane="device, then cpu")
        cause, origin = explain(error, place)
        return failure(cause, f"in DataLoader device lane ({origin})", origin=origin)


def _split(piece: Piece, at: int, first: int) -> int:
    """The split point at which the ticket comes."""
    source = None if piece.sources is None else piece.sources[at]
    return source.stage if isinstance(source, Handed) else first


def _refused(task: Task) -> Report:
    """Nothing of the task has been done, nor will be."""
    now = perf_counter()
    return Report(task.run, task.chunk, worker=0, first=0, done=0, seconds=0.0, begin=now, end=now, final=True)
