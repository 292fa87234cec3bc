"""What workers have read of a task's samples, as the device lane takes it in; of the next task, too, ahead of its turn.

While the device is at a micro-batch, the next task is read, and the device is asked to go on with that one: so its
decoder does not wait for the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.run import DeviceRun
from minato_gpu.device.values import Given
from minato_gpu.lanes.base import Begun, Failure, Handed, Item, Piece, Task, failure
from minato_gpu.lanes.store import Store
from minato_gpu.samples import Origin, explain, sample_seed


class ReadTask(NamedTuple):
    """Samples ``numbers`` of a task: references of those that could not be read, the places of the others among them,
    and what is given to the executor. ``begun``: the device has been asked for them."""

    task: Task
    numbers: list[int]
    items: list[Item]
    ready: list[int]
    given: list[Given]
    begun: bool = False


class TaskReader:
    """For one thread. ``executors`` by split point; ``first``: the split point of samples that were not handed over;
    ``between``: called before each sample; ``next_task``: the one that will be begun next, if there is one."""

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
        self._coming: ReadTask | None = None  # a task that comes later, of which the device may have begun

    def look_ahead(self) -> None:
        """Read the task that comes next, and have the device begin it."""
        if self._coming is not None or (task := self._next_task()) is None:
            return
        run = DeviceRun(task, self._first)
        parts = run.by_split()
        if len(parts) == 1:
            ((split, numbers),) = parts.items()
            read = self._read(run, numbers)
            self._coming = read._replace(begun=self._executors[split].ahead(read.given))

    def read(self, run: DeviceRun, split: int, numbers: list[int]) -> ReadTask:
        """What the host read of these samples has left: as it was read ahead, or now."""
        read = self._coming
        if read is None or read.task is not run.task:
            return self._read(run, numbers)
        self._coming = None
        if read.numbers == numbers:
            return read
        self._executors[split].forget()
        return self._read(run, numbers)

    def forget(self) -> None:
        """Nothing of what was begun ahead will be asked for."""
        self._coming = None
        for executor in self._executors.values():
            with contextlib.suppress(Exception):
                executor.forget()

    def fields(self, piece: Piece, at: int, task: Task) -> Given | Failure:
        """What the host read of a sample has left, or why there is nothing to go on with."""
        source = None if piece.sources is None else piece.sources[at]
        assert source is not None
        self._between()
        if isinstance(source, Failure):  # it could not even be read
            return source
        lying = source.fields if isinstance(source, Handed) else source
        try:
            begun: Begun = self._store.get(lying)
            fields, drawn = begun
            return fields, ticket_seed(task, piece, at) if drawn is None else drawn
        except Exception as error:  # an object of the data set's own may refuse to be unpickled here
            return ticket_failure(task, piece, at, error, "device")

    def _read(self, run: DeviceRun, numbers: list[int]) -> ReadTask:
        items: list[Item] = [None] * len(numbers)
        ready: list[int] = []
        given: list[Given] = []
        for at, number in enumerate(numbers):
            one = self.fields(*run.tickets[number], run.task)
            if isinstance(one, Failure):
                items[at] = one
            else:
                ready.append(at)
                given.append(one)
        return ReadTask(run.task, numbers, items, ready, given)


def ticket_seed(task: Task, piece: Piece, at: int) -> int:
    """The seed of a ticket's sample."""
    occurrence = 0 if piece.occurrences is None else piece.occurrences[at]
    return sample_seed(task.seed, 0, piece.keys[at], occurrence)


def ticket_failure(task: Task, piece: Piece, at: int, error: Exception, lane: str) -> Failure:
    """Why there is no sample for a ticket; ``lane``: where that was found."""
    place = Origin(task.epoch, piece.position_of(at), piece.keys[at], lane=lane)
    cause, origin = explain(error, place)
    return failure(cause, f"in DataLoader device lane ({origin})", origin=origin)
