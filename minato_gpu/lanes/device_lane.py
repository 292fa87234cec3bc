"""The device lane: one executor in a thread of the training process, fed with what CPU workers have read.

It takes every task that waits, one micro-batch at a time, and writes finished samples into their rows of the batch.
A sample that fails on the device is tried once more on the CPU implementation, with the same draws, before its
failure counts. Where not even one sample fits into the device's memory, the lane says so and retires, if there is a CPU
lane to go on alone: what it was sent goes back to the scheduler. So it does where it cannot be opened; the only lane
there is has an ``error`` instead.

A function that does not return holds the lane for good: a thread cannot be ended from outside. ``at_work`` tells what
the thread is at, so that such a lane is noticed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import warnings
from collections import deque
from time import perf_counter
from typing import Any

from minato_gpu.lanes import stacks
from minato_gpu.lanes.ahead import BuildAhead
from minato_gpu.lanes.at import At
from minato_gpu.lanes.base import Failure, Handed, Local, Part, Piece, Report, Task, failure
from minato_gpu.lanes.delay import CoreTime
from minato_gpu.lanes.device import build_executor
from minato_gpu.lanes.links import Links
from minato_gpu.lanes.outlet import Outlet
from minato_gpu.lanes.priority import give_way
from minato_gpu.lanes.store import Store
from minato_gpu.memory.accelerator import is_out_of_memory
from minato_gpu.memory.board import ATTENTION, Claim
from minato_gpu.memory.rate import measured_rate
from minato_gpu.memory.transfers import Transfers
from minato_gpu.notices import LOGGER, say_once
from minato_gpu.pipeline import Pipeline
from minato_gpu.samples import Origin, StageError, explain, sample_seed
from minato_gpu.threads import OwnThread

_USUAL_RATE = 1e9  # bytes per second


class DeviceLane:
    """One executor and its thread. ``threads``: DALI's threads on the CPU; ``transfers``: where batches live on a
    device, the way there; ``may_retire``: another lane prepares samples too."""

    name = "device"
    slots = 1
    away = 0
    can_kill = False
    advice = "It was not ended: a thread cannot be from outside."

    def __init__(
        self,
        links: Links,
        pipeline: Pipeline,
        device: str,
        micro_batch: int,
        threads: int = 1,
        transfers: Transfers | None = None,
        may_retire: bool = False,
    ) -> None:
        self._links = links
        self._pipeline = pipeline
        self._first = pipeline.host_prefix
        self._at = At()
        self._executors = {
            split: build_executor(pipeline, split, device=device, max_batch=micro_batch, threads=threads, at=self._at)
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
        self._task: Task | None = None  # the current one
        self._numbers: list[int] = []  # which of its samples the executor was given
        self._hung = False
        self._repeated = 0  # samples of the current task that ran a second time, on the CPU
        self._looked = 0  # graphs built when their threads were last looked for
        self._may_retire = may_retire
        self.retired = False
        self.ready = False  # once DALI is imported; until then the CPU lane serves alone
        self._thread: OwnThread | None = OwnThread(target=self._main, name="minato-device", daemon=True)
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

    def at_work(self) -> dict[int, tuple[float, Claim]]:
        """Since when the thread has been at its current step, and what that is, as the CPU lane says it of workers."""
        task, step, numbers = self._task, self._at.step, self._numbers
        if task is None:
            return {}
        sample = self._at.number(step)
        started = 0 if sample is None or sample >= len(numbers) else numbers[sample] + 1
        return {0: (step.since, Claim(task.run, task.chunk, started, step.stage + 1))}

    @property
    def together(self) -> int:
        """How many samples the current step is at, at once."""
        return self._at.step.samples

    def who(self, worker: int) -> str:
        """What is watched, in words."""
        return "device lane (a thread of the training process)"

    def stuck_at(self, worker: int) -> str:
        """What the thread is at; from now on it is taken to hang."""
        self._hung = True
        thread = self._thread
        return "" if thread is None else f"\nIts thread is at:\n{stacks.of_thread(thread)}"

    def close(self, timeout: float) -> bool:
        """Wait for the micro-batch under way, then let go of graphs and memory; idempotent.

        False where it has been seen to hang and still does after ``timeout``: then all of that stays.
        """
        if self._thread is None:
            return True
        self.recall()
        self._tasks.put(None)
        self._thread.join(timeout if self._hung else None)
        if self._thread.is_alive():
            warnings.warn(
                f"the device lane still hangs {timeout} s after its loader was closed; a thread cannot be ended from "
                "outside, so it and its memory stay.",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
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
        while (task := self._tasks.get()) is not None:
            report = _refused(task) if self.retired else self._run(task, cores)
            del task
            self._reports.append(report)
            self._signal()
        cores.close()

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
                LOGGER.warning("the device lane cannot be opened; the CPU lane goes on alone (%r)", error)
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

    def _run(self, task: Task, cores: CoreTime) -> Report:
        begin = perf_counter()
        self._at.enter()
        self._task, self._repeated = task, 0
        self._look(cores)
        tickets = [(piece, at) for piece in task.pieces for at in range(len(piece.keys))]
        items: list[Any] = [None] * len(tickets)
        times: list[float] = [0.0] * len(tickets)
        usual = True
        for split, numbers in self._by_split(tickets).items():
            started, used, builds = perf_counter(), cores(), self._executors[split].builds
            chosen = [tickets[number] for number in numbers]
            try:
                found = self._prepare(task, chosen, numbers, split)
            except Exception as error:  # not a sample's own: every ticket says what happened, and the lane goes on
                found = [self._failure(task, piece, at, error) for piece, at in chosen]
            took = perf_counter() - started
            if self._executor.device == "cpu":  # what it waited for a core is not the sample's cost
                took = min(max(cores() - used, 1e-6), took)
            usual = usual and self._executors[split].builds == builds and self._repeated == 0
            for number, item in zip(numbers, found, strict=True):
                items[number], times[number] = item, took / len(numbers)
            if self._ahead is not None and not self.retired:
                self._ahead.ran(split)
        end = perf_counter()
        count = len(tickets)
        self._task = None
        self._look(cores)
        parts: list[Part | None] | None = None
        if usual and self._pipeline.cuts:
            parts = [(_split(*ticket, self._first), (each,)) for ticket, each in zip(tickets, times, strict=True)]
        return Report(
            run=task.run,
            chunk=task.chunk,
            worker=0,
            first=0,
            done=count,
            seconds=end - begin,
            begin=begin,
            end=end,
            final=True,
            nbytes=sum(item.nbytes for item in items if isinstance(item, Local)),
            items=items if any(item is not None for item in items) else None,
            times=times if usual else None,
            parts=parts,
            layout=self._learned(),
            repeated=self._repeated,
        )

    def _look(self, cores: CoreTime) -> None:
        """Graphs that have been built, here or ahead, have brought threads of their own."""
        builds = sum(executor.builds for executor in self._executors.values())
        if builds != self._looked or self._repeated:
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

    def _prepare(self, task: Task, tickets: list[tuple[Piece, int]], numbers: list[int], split: int) -> list[Any]:
        executor = self._executors[split]
        items: list[Any] = [self._known_failure(piece, at) for piece, at in tickets]
        ready = [number for number, item in enumerate(items) if item is None]
        fields = [self._fields(*tickets[number], task) for number in ready]
        self._numbers = [numbers[number] for number in ready]
        if self._ahead is not None:
            self._ahead.start(fields)
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
                    made = self._executors[split].made
                self._at.enter(sample=sample)
                items[number] = self._finish(task, piece, at, result, made)
            self._at.enter(samples=len(items))
            return self._outlet.finish(items)

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
            self._retire(error)
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

    def _retire(self, error: Exception) -> None:
        """The device has no memory for even one sample."""
        if self._may_retire and not self.retired:
            self.retired = True
            LOGGER.warning("the device has no memory left to prepare samples; the CPU lane goes on alone (%s)", error)

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
