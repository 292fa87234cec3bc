"""Tasks on the device lane: the state of one, and the fields that CPU workers prepared for its samples.

While the device works on one micro-batch, ``TaskReader.look_ahead`` reads the next task and has the executor schedule
it, so that the device's decoder does not wait for the host.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import NamedTuple

from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.output import Issued
from minato_gpu.device.values import ExecutorInput
from minato_gpu.lanes.base import Begun, Failure, Handed, Item, Piece, Report, Task, failure
from minato_gpu.lanes.store import Store
from minato_gpu.samples import Origin, explain, sample_seed


class Part(NamedTuple):
    """Samples of a task that share a split point and were issued together."""

    split: int
    numbers: list[int]  # numbers of the tickets in the task
    issued: Issued
    host_s: float  # seconds: CPU time of issuing, at most the wall time
    ran: list[int]  # those of ``numbers`` whose samples could be read
    repeated: int  # samples that the CPU has prepared in the device's place
    out_of_memory: bool  # the device had no memory for it


class DeviceRun:
    """One task in flight, for the lane's thread. Tickets are numbered through the task; lists are in that order."""

    def __init__(self, task: Task, first: int) -> None:
        """``first``: the split point of samples that were not handed over by a CPU worker."""
        self.task = task
        self.tickets = [(piece, at) for piece in task.pieces for at in range(len(piece.keys))]
        sources = [None if piece.sources is None else piece.sources[at] for piece, at in self.tickets]
        self.splits = [one.stage if isinstance(one, Handed) else first for one in sources]
        self.parts: deque[Part] = deque()  # issued and not finished
        self.submitted: list[int] = []  # numbers of the tickets that the executor was given last
        self.items: list[Item] = [None] * len(self.tickets)  # references
        self.times = [0.0] * len(self.tickets)  # seconds each; 0.0 for one that could not be read
        self.begin = perf_counter()
        self.typical = True  # nothing was built or waited for, so that the cost model may learn from ``times``
        self.repeated = 0  # samples that ran a second time, on the CPU
        self.device_s: float | None = 0.0  # device time in all; None where it is not measured

    def by_split(self) -> dict[int, list[int]]:
        """Returns the tickets' numbers grouped by the split point at which they enter."""
        found: dict[int, list[int]] = {}
        for number, split in enumerate(self.splits):
            found.setdefault(split, []).append(number)
        return found

    @property
    def finished(self) -> bool:
        """True when the device has finished all issued parts, so that reporting would not wait."""
        return all(part.issued.finished for part in self.parts)

    def settle(self, part: Part, items: list[Item], device_s: float | None) -> None:
        """Stores a finished part: the references ``items``, and its device time in seconds (None: not measured)."""
        self.device_s = None if device_s is None or self.device_s is None else self.device_s + device_s
        each = (part.host_s if device_s is None else device_s) / max(1, len(part.ran))
        for number, item in zip(part.numbers, items, strict=True):
            self.items[number] = item
        for number in part.ran:
            self.times[number] = each

    def report(self, begin: float, end: float, layout: bytes | None, *, tells_parts: bool) -> Report:
        """Returns the final report. ``begin`` and ``end`` are times of ``perf_counter``; ``layout``: the pickled one
        that the engine wants, else None; ``tells_parts``: whether costs are also reported by split point."""
        usual = self.typical and not self.repeated
        pairs = zip(self.splits, self.times, strict=True)
        return Report(
            run=self.task.run,
            chunk=self.task.chunk,
            worker=0,
            first=0,
            done=len(self.tickets),
            seconds=end - begin if self.device_s is None else self.device_s,
            begin=begin,
            end=end,
            final=True,
            items=self.items if any(item is not None for item in self.items) else None,
            times=self.times if usual else None,
            parts=[(split, (each,)) for split, each in pairs] if usual and tells_parts else None,
            layout=layout,
            repeated=self.repeated,
        )


class ReadTask(NamedTuple):
    """Fields of some samples of a task, ready for the executor."""

    task: Task
    found: dict[int, ExecutorInput | Failure]  # by number of the ticket in the task; a failure: it could not be read
    scheduled: bool = False  # the executor has scheduled them

    @property
    def given(self) -> dict[int, ExecutorInput]:
        """The samples that could be read, for the executor, by number."""
        return {number: one for number, one in self.found.items() if not isinstance(one, Failure)}


class TaskReader:
    """Reads samples for the executors of one lane; for the lane's thread.

    Args:
        executors: by split point.
        first: the split point of samples that were not handed over.
        between: called before each sample.
        next_task: returns the task that will be begun next, if there is one.
    """

    def __init__(
        self,
        store: Store,
        executors: Mapping[int, DeviceExecutor],
        first: int,
        between: Callable[[], None],
        next_task: Callable[[], Task | None],
    ) -> None:
        self._store = store
        self._executors = executors
        self._first = first
        self._between = between
        self._next_task = next_task
        self._ahead: ReadTask | None = None  # read ahead of its turn

    def look_ahead(self) -> None:
        """Reads the next task, if there is one with a single split point, and schedules it behind the current
        micro-batch."""
        if self._ahead is not None or (task := self._next_task()) is None:
            return
        run = DeviceRun(task, self._first)
        parts = run.by_split()
        if len(parts) == 1:
            ((split, numbers),) = parts.items()
            read = self.read_now(run, numbers)
            self._ahead = read._replace(scheduled=self._executors[split].ahead([*read.given.values()]))

    def read(self, run: DeviceRun, split: int, numbers: list[int]) -> ReadTask:
        """Returns the samples ``numbers`` of a task: as read ahead if it was exactly these, else read now."""
        read = self._ahead
        if read is None or read.task is not run.task:
            return self.read_now(run, numbers)
        self._ahead = None
        if [*read.found] == numbers:
            return read
        self._executors[split].forget()
        return self.read_now(run, numbers)

    def forget(self) -> None:
        """Drops what was read and scheduled ahead."""
        self._ahead = None
        for executor in self._executors.values():
            with contextlib.suppress(Exception):
                executor.forget()

    def _fields(self, piece: Piece, at: int, task: Task) -> ExecutorInput | Failure:
        """Returns a sample's fields with its seed or draws, or the failure that keeps it from being prepared."""
        source = None if piece.sources is None else piece.sources[at]
        assert source is not None
        self._between()
        if isinstance(source, Failure):  # it could not even be read
            return source
        location = source.fields if isinstance(source, Handed) else source
        try:
            begun: Begun = self._store.get(location)
            fields, drawn = begun
            return fields, ticket_seed(task, piece, at) if drawn is None else drawn
        except Exception as error:  # an object of the data set's own may refuse to be unpickled here
            return ticket_failure(task, piece, at, error, "device")

    def read_now(self, run: DeviceRun, numbers: Iterable[int]) -> ReadTask:
        """Returns the samples ``numbers`` of a task."""
        return ReadTask(run.task, {number: self._fields(*run.tickets[number], run.task) for number in numbers})


def ticket_seed(task: Task, piece: Piece, at: int) -> int:
    """Returns the seed of a ticket's sample."""
    occurrence = 0 if piece.occurrences is None else piece.occurrences[at]
    return sample_seed(task.seed, 0, piece.keys[at], occurrence)


def ticket_failure(task: Task, piece: Piece, at: int, error: Exception, lane: str) -> Failure:
    """Returns the failure of a ticket's sample from an exception; ``lane`` names where it happened."""
    place = Origin(task.epoch, piece.position_of(at), piece.keys[at], lane=lane)
    cause, origin = explain(error, place)
    return failure(cause, f"in DataLoader device lane ({origin})", origin=origin)
