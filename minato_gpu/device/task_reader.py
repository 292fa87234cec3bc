"""Reads the fields that CPU workers prepared for a task's samples, and reads the next task ahead of its turn.

While the device works on one micro-batch, ``TaskReader.look_ahead`` reads the next task and has the executor schedule
it, so that the device's decoder does not wait for the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.run import DeviceRun
from minato_gpu.device.values import ExecutorInput
from minato_gpu.lanes.base import Begun, Failure, Handed, Item, Piece, Task, failure
from minato_gpu.lanes.store import Store
from minato_gpu.samples import Origin, explain, sample_seed


class ReadTask(NamedTuple):
    """Fields of some samples of a task, ready for the executor."""

    task: Task
    numbers: list[int]  # numbers of the tickets in the task
    items: list[Item]  # for each number: its failure, else None
    ready: list[int]  # indices into ``numbers`` of the samples that were read
    given: list[ExecutorInput]  # their fields, for the executor
    scheduled: bool = False  # the executor has scheduled them


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
            read = self._read(run, numbers)
            self._ahead = read._replace(scheduled=self._executors[split].ahead(read.given))

    def read(self, run: DeviceRun, split: int, numbers: list[int]) -> ReadTask:
        """Returns the samples ``numbers`` of a task: as read ahead if it was exactly these, else read now."""
        read = self._ahead
        if read is None or read.task is not run.task:
            return self._read(run, numbers)
        self._ahead = None
        if read.numbers == numbers:
            return read
        self._executors[split].forget()
        return self._read(run, numbers)

    def forget(self) -> None:
        """Drops what was read and scheduled ahead."""
        self._ahead = None
        for executor in self._executors.values():
            with contextlib.suppress(Exception):
                executor.forget()

    def fields(self, piece: Piece, at: int, task: Task) -> ExecutorInput | Failure:
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

    def _read(self, run: DeviceRun, numbers: list[int]) -> ReadTask:
        items: list[Item] = [None] * len(numbers)
        ready: list[int] = []
        given: list[ExecutorInput] = []
        for at, number in enumerate(numbers):
            one = self.fields(*run.tickets[number], run.task)
            if isinstance(one, Failure):
                items[at] = one
            else:
                ready.append(at)
                given.append(one)
        return ReadTask(run.task, numbers, items, ready, given)


def ticket_seed(task: Task, piece: Piece, at: int) -> int:
    """Returns the seed of a ticket's sample."""
    occurrence = 0 if piece.occurrences is None else piece.occurrences[at]
    return sample_seed(task.seed, 0, piece.keys[at], occurrence)


def ticket_failure(task: Task, piece: Piece, at: int, error: Exception, lane: str) -> Failure:
    """Returns the failure of a ticket's sample from an exception; ``lane`` names where it happened."""
    place = Origin(task.epoch, piece.position_of(at), piece.keys[at], lane=lane)
    cause, origin = explain(error, place)
    return failure(cause, f"in DataLoader device lane ({origin})", origin=origin)
