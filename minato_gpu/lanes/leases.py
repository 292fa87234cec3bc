"""The leases that workers have: how far they are, told by the marks of their tickets and by messages."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any

from minato_gpu.lanes.base import Blob, Item, Part, Report, Task
from minato_gpu.lanes.contract import Number
from minato_gpu.lanes.progress import COSTLY_S
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.completions import BLOB, IN_ROW, LOCAL, PICKLED, READY, ROW, Lying


def lay_down(item: Item, part: Part | None, mark: int, store: Store, links: WorkerChannels) -> Lying:
    """In the worker: where the parent finds the reference of a finished sample, and what its ``part`` took.

    Raises what pickling them does.
    """
    if item is None and part is None:
        return IN_ROW
    if store.handover is None:
        links.completions.local[mark] = item, part
        return LOCAL, 0, 0
    if isinstance(item, Blob) and len(item.blocks) == 1 and part is None:
        return BLOB, *item.blocks[0]
    return PICKLED, *store.lay_down(ForkingPickler.dumps((item, part)))


class Lease:
    """The tickets of one task: runs of marks, and how many of the first are reported."""

    __slots__ = ("begin", "cut", "last", "number", "reported", "runs", "size")

    def __init__(self, task: Task) -> None:
        self.number = task.run, task.chunk
        self.runs = [(piece.marks, piece.marks + len(piece.keys)) for piece in task.pieces]
        self.size = sum(end - begin for begin, end in self.runs)
        self.last = self.runs[-1][1] - 1
        self.cut = False  # some were taken back: a message tells when the worker is through
        self.reported = 0
        self.begin: float | None = None  # when the first sample was begun, once it is reported

    def between(self, start: int, stop: int) -> Iterable[tuple[int, int]]:
        """The marks of samples number ``start`` to ``stop``."""
        if len(self.runs) == 1:
            begin = self.runs[0][0]
            return ((begin + start, begin + stop),)
        return self._parts(start, stop)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        for begin, end in self.runs:
            size = end - begin
            if start < size and stop > 0:
                yield begin + max(start, 0), begin + min(stop, size)
            start, stop = start - size, stop - size


class Leases:
    """The leases that are under way, those of runs that were given up among them."""

    def __init__(self, links: WorkerChannels) -> None:
        self._links = links
        self._completions = links.completions
        self._leases: dict[Number, Lease] = {}
        self._by_message: set[Number] = set()  # tasks that only messages tell of
        self._read: deque[tuple[int, int]] = deque()  # worker and offset of what has been read, to be given back

    def add(self, task: Task) -> None:
        """A task goes to the lane."""
        if task.kind in ("run", "next") and all(piece.marks >= 0 for piece in task.pieces):
            self._leases[task.run, task.chunk] = Lease(task)
        else:
            self._by_message.add((task.run, task.chunk))

    def __contains__(self, number: Number) -> bool:
        """Whether the lane has this task, and has not told its end."""
        return number in self._leases or number in self._by_message

    def drop(self, run: int, chunk: int) -> None:
        """Nobody is at this task, and what was not reported of it is to be prepared again."""
        self._by_message.discard((run, chunk))
        lease = self._leases.pop((run, chunk), None)
        for begin, end in () if lease is None else lease.between(lease.reported, lease.size):
            self._completions.clear(begin, end)

    def bury(self, worker: int) -> None:
        """A worker has died: nobody is left to be given back what it had laid down."""
        self._read = deque(block for block in self._read if block[0] != worker)

    def give_back(self, worker: int, offset: int) -> None:
        """What the worker laid down there has been read; it is told now, or when it has room to be told."""
        self._read.append((worker, offset))
        while self._read and self._links.board.give_back(*self._read[0]):
            self._read.popleft()

    def reports(self, messages: Iterable[Report], *, unfinished: bool) -> list[Report]:
        """What messages and marks tell, each sample once; see ``Lane.receive``."""
        reports: list[Report] = []
        for message in messages:
            lease = self._leases.get((message.run, message.chunk))
            if lease is not None:
                if message.first > lease.reported:
                    reports.append(self._take(lease, message.first))
                lease.reported = max(lease.reported, message.done)  # marks may have told more than what is described
                if message.final:
                    del self._leases[lease.number]
            elif message.final:
                self._by_message.discard((message.run, message.chunk))
            reports.append(message)
        status = self._completions.status
        leases = [each for each in self._leases.values() if unfinished or (status[each.last] in READY and not each.cut)]
        return reports + [report for report in map(self._told, leases) if report is not None] if leases else reports

    def low(self, slots: int) -> int:
        """The number of the lease at whose end half of what waits for ``slots`` workers will have been taken; 0 where
        that is not much, or some are of a run that was given up: numbers start anew with each run."""
        half = (len(self._leases) - slots) // 2
        if half < 1 or next(iter(self._leases))[0] != next(reversed(self._leases))[0]:
            return 0
        return next(islice(self._leases, half, None))[1]

    def revoked(self, run: int, chunk: int, keep: int) -> None:
        """Samples of the task from number ``keep`` on are another worker's now."""
        lease = self._leases.get((run, chunk))
        if lease is not None and keep < lease.size:
            lease.size, lease.cut = keep, True

    def report(self, run: int, chunk: int) -> Report | None:
        """What marks tell of one lease."""
        lease = self._leases.get((run, chunk))
        return None if lease is None else self._told(lease)

    def _told(self, lease: Lease) -> Report | None:
        done = lease.reported
        for begin, end in lease.between(done, lease.size):
            leading = self._completions.leading(begin, end)
            done += leading
            if leading < end - begin:
                break
        return self._take(lease, done) if done > lease.reported else None

    def _take(self, lease: Lease, done: int) -> Report:
        first, times, ends, seconds = lease.reported, list[float](), list[float](), 0.0
        found: list[tuple[Item, Part | None]] = []
        worker = -1
        for begin, stop in lease.between(first, done):
            took, elapsed, ended, worker, lying = self._completions.take(begin, stop)
            if lying is not None:
                found += [(None, None)] * (len(times) - len(found))
                found += [self._found(begin + at, worker, *where) for at, where in enumerate(lying)]
            times += took
            ends += ended
            seconds += elapsed
        lease.reported = done
        final = done == lease.size and not lease.cut
        if final:
            del self._leases[lease.number]
        if lease.begin is None:
            lease.begin = ends[-1] - seconds
        known: dict[str, Any] = {}
        if max(times) > COSTLY_S:
            known.update(times=times, ends=ends)
        if found:  # what is no plain row, and what comes before it
            found += [(None, None)] * (len(times) - len(found))
            items, parts = [item for item, _ in found], [part for _, part in found]
            known.update(items=items, nbytes=sum(item.nbytes for item in items if item is not None))
            known["parts"] = parts if known.get("times") and any(parts) else None
        return Report(*lease.number, worker, first, done, seconds, lease.begin, ends[-1], final, **known)

    def _found(self, mark: int, worker: int, kind: int, offset: int, nbytes: int) -> tuple[Item, Part | None]:
        """What ``lay_down`` has laid down."""
        if kind == ROW:
            return None, None
        if kind == BLOB:
            return Blob(worker, ((offset, nbytes),)), None
        if kind == LOCAL:
            local: tuple[Item, Part | None] = self._completions.local.pop(mark)
            return local
        data = bytes(self._links.buffer(worker)[offset : offset + nbytes])
        self.give_back(worker, offset)
        found: tuple[Item, Part | None] = pickle.loads(data)
        return found
