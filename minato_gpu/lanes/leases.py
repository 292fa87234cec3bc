"""What a CPU lane keeps of the leases that its workers have: how far they are, by their marks and by messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from minato_gpu.lanes.base import Blob, Report, Task
from minato_gpu.lanes.progress import COSTLY_S
from minato_gpu.memory.completions import Completions, Record

Number = tuple[int, int]
"""Run and chunk."""


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

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The marks of samples number ``start`` to ``stop``."""
        for begin, end in self.runs:
            size = end - begin
            if start < size and stop > 0:
                yield begin + max(start, 0), begin + min(stop, size)
            start, stop = start - size, stop - size


class Leases:
    """The leases that are under way, those of runs that were given up among them."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._leases: dict[Number, Lease] = {}

    def add(self, task: Task) -> None:
        """A task goes to the lane."""
        if task.kind == "run" and all(piece.marks >= 0 for piece in task.pieces):
            self._leases[task.run, task.chunk] = Lease(task)

    def drop(self, run: int, chunk: int) -> None:
        """Nobody is at this task, and what was not reported of it is to be prepared again."""
        lease = self._leases.pop((run, chunk), None)
        for begin, end in () if lease is None else lease.between(lease.reported, lease.size):
            self._completions.clear(begin, end)

    def reports(self, messages: Iterable[Report], *, unfinished: bool) -> list[Report]:
        """What messages and marks tell, each sample once; see ``Lane.receive``."""
        reports: list[Report] = []
        for message in messages:
            lease = self._leases.get((message.run, message.chunk))
            if lease is not None:
                if message.first > lease.reported:
                    reports.append(self._take(lease, message.first))
                lease.reported = message.done
                if message.final:
                    del self._leases[lease.number]
            reports.append(message)
        is_ready = self._completions.is_ready
        for lease in list(self._leases.values()):
            if (unfinished or (is_ready(lease.last) and not lease.cut)) and (report := self._told(lease)) is not None:
                reports.append(report)
        return reports

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
        first, records = lease.reported, list[Record]()
        for begin, end in lease.between(first, done):
            records += self._completions.take(begin, end)
        lease.reported = done
        final = done == lease.size and not lease.cut
        if final:
            del self._leases[lease.number]
        seconds, times = sum(record.elapsed for record in records), [record.took for record in records]
        last = records[-1]
        if lease.begin is None:
            lease.begin = last.end - seconds
        nbytes = sum(record.nbytes for record in records)
        return Report(
            *lease.number,
            last.worker,
            first,
            done,
            seconds,
            lease.begin,
            last.end,
            final,
            nbytes,
            [_reference(record) for record in records] if nbytes else None,
            times if max(times) > COSTLY_S else None,
        )


def _reference(record: Record) -> Blob | None:
    return Blob(record.worker, ((record.offset, record.nbytes),)) if record.nbytes else None
