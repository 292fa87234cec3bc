"""The leases that workers have: how far they are, as the marks of their tickets tell."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from time import perf_counter
from typing import Any

from minato_gpu.lanes.base import Blob, Features, Item, Part, Report, Task, TicketOutcome
from minato_gpu.lanes.contract import Number
from minato_gpu.lanes.progress import COSTLY_S
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.completions import BATCH, BLOB, LOCAL, PICKLED, READ, READS, READY, RETURNED, ROW, Location

_PLAIN = TicketOutcome(None)


def store_outcome(outcome: TicketOutcome, mark: int, store: Store, links: WorkerChannels) -> Location:
    """Stores what is to be said of a finished ticket, in the worker; returns where the parent finds it.

    Raises what pickling it raises.
    """
    item = outcome.item
    if store.handover is None:
        links.completions.local[mark] = outcome
        return LOCAL, 0, 0
    if isinstance(item, Blob) and len(item.blocks) == 1 and outcome[1:] == _PLAIN[1:]:
        return BATCH if item.collated else BLOB, *item.blocks[0]
    return PICKLED, *store.put_bytes(ForkingPickler.dumps(tuple(outcome)))


def store_reads(items: list[Item], store: Store) -> list[Location] | None:
    """Stores these host reads in one block, in the worker, which costs it a tenth of a pickle for each.

    None if something else is among them, or they cannot be stored together.
    """
    reads: list[tuple[tuple[tuple[int, int], ...], tuple[float, ...]]] = []
    for item in items:
        if not (isinstance(item, Features) and isinstance(item.fields, Blob)):
            return None
        reads.append((item.fields.blocks, item.values))
    try:
        offset, nbytes = store.put_bytes(pickle.dumps(reads, 5))
    except Exception:  # each by itself: it is found which one cannot be
        return None
    return [(READS, offset, nbytes), *[(READ, 0, 0)] * (len(items) - 1)]


class Lease:
    """The tickets of one task: runs of marks, and how many tickets, from the first on, are reported."""

    __slots__ = ("begin", "cut", "last", "number", "reported", "runs", "singly", "size", "watched", "worker")

    def __init__(self, task: Task) -> None:
        self.number = task.run, task.chunk
        self.singly = task.kind in ("run", "next")  # samples are reported, and taken back, without waiting for all
        self.runs = [(piece.marks, piece.marks + len(piece.keys)) for piece in task.pieces]
        self.size = sum(end - begin for begin, end in self.runs)
        self.last = self.runs[-1][1] - 1
        # the last mark does not tell that there is something: it may end earlier, or is to describe its first sample
        self.watched = task.credit > 0 or task.layout == b""
        self.cut = False  # some were taken back: the board says where the worker has stopped
        self.reported = 0
        self.worker = -1  # worker that has the task; -1: not known yet
        self.begin: float | None = None  # when the first sample was begun, once it is reported

    def between(self, start: int, stop: int) -> Iterable[tuple[int, int]]:
        """Returns the marks of samples from number ``start`` to before ``stop``, as ranges (first, end)."""
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
    """The leases under way, with those of runs that were given up."""

    def __init__(self, links: WorkerChannels) -> None:
        self._links = links
        self._completions = links.completions
        self._leases: dict[Number, Lease] = {}
        self._read: deque[tuple[int, int]] = deque()  # worker and offset of what has been read, to be given back

    def add(self, task: Task) -> None:
        """Adds a task that goes to the lane."""
        self._leases[task.run, task.chunk] = Lease(task)

    def __contains__(self, number: Number) -> bool:
        """Returns whether the lane has this task, and has not reported its end."""
        return number in self._leases

    def drop(self, run: int, chunk: int) -> None:
        """Drops a task that no worker is at, and clears the marks of what was not reported: that is to be prepared
        again."""
        lease = self._leases.pop((run, chunk), None)
        for begin, end in () if lease is None else lease.between(lease.reported, lease.size):
            self._completions.clear(begin, end)

    def bury(self, worker: int) -> None:
        """Handles the death of a worker: what it stored, and was still to be given back, is forgotten."""
        self._read = deque(block for block in self._read if block[0] != worker)

    def give_back(self, worker: int, offset: int) -> None:
        """Tells the worker that what it stored there has been read, now or when the board has room."""
        self._read.append((worker, offset))
        while self._read and self._links.board.give_back(*self._read[0]):
            self._read.popleft()

    def reports(self, *, unfinished: bool) -> list[Report]:
        """Returns what is finished, each sample once, of leases whose last sample is, and of those that may end early;
        with ``unfinished`` of all others, too.
        """
        status, found = self._completions.status, list[tuple[Lease, int]]()
        for lease in reversed(self._leases.values()):
            if unfinished or lease.watched or status[lease.last] in READY:
                done = self._done(lease)
                if done is not None:
                    found.append((lease, done))
        return [self._take(lease, done) for lease, done in reversed(found)] if found else []

    def low(self, slots: int) -> int:
        """Returns the least number of a chunk whose end is to wake the receiver: by then half of the leases beyond one
        for each of ``slots`` workers are taken.

        0, so that each end wakes it, if these are fewer than two, or some are of a run that was given up: numbers start
        anew with each run.
        """
        half = (len(self._leases) - slots) // 2
        if half < 1 or next(iter(self._leases))[0] != next(reversed(self._leases))[0]:
            return 0
        return next(islice(self._leases, half, None))[1]

    def revoked(self, run: int, chunk: int, keep: int, worker: int) -> None:
        """Notes that samples of the task from number ``keep`` on are not this worker's any more."""
        lease = self._leases.get((run, chunk))
        if lease is not None and lease.singly:
            lease.size, lease.watched, lease.worker, lease.cut = min(keep, lease.size), True, worker, True

    def shorten(self, number: Number, size: int) -> None:
        """Notes that no sample of the task from number ``size`` on is prepared."""
        if (lease := self._leases.get(number)) is not None:
            lease.size, lease.watched = min(size, lease.size), True

    def settle(self, worker: int) -> None:
        """Finds out where tasks that were cut short ended at this worker, before another one is cut short."""
        for lease in self._leases.values():
            if lease.cut and lease.worker == worker:
                self._settle(lease)

    def _settle(self, lease: Lease) -> None:
        stopped = self._links.board.stopped(lease.worker, *lease.number)
        lease.size = lease.size if stopped is None else min(stopped, lease.size)

    def report(self, run: int, chunk: int) -> Report | None:
        """Returns what is newly finished of one lease; None if nothing is, or there is no such lease."""
        lease = self._leases.get((run, chunk))
        done = None if lease is None else self._done(lease)
        return None if lease is None or done is None else self._take(lease, done)

    def _done(self, lease: Lease) -> int | None:
        """Returns how many samples of the lease are finished; None if there is nothing to report."""
        if lease.cut:
            self._settle(lease)
        done = lease.reported
        for begin, end in lease.between(done, lease.size):
            leading = self._completions.leading(begin, end)
            done += leading
            if leading < end - begin:
                break
        return None if done < lease.size and (done == lease.reported or not lease.singly) else done

    def _take(self, lease: Lease, done: int) -> Report:
        first, worker, times, ends, seconds = lease.reported, lease.worker, list[float](), list[float](), 0.0
        others: dict[int, TicketOutcome] = {}  # outcomes of samples that are no plain rows, by offset
        for begin, stop in lease.between(first, done):
            took, elapsed, ended, worker, locations = self._completions.take(begin, stop)
            for at, (kind, offset, nbytes) in enumerate(locations or ()):
                if kind == RETURNED:
                    done = lease.size = first + len(times) + at
                elif kind == READS:
                    reads = self._reads(worker, offset, nbytes)
                    others.update(enumerate(reads, len(times) + at))
                elif kind not in (ROW, READ):
                    others[len(times) + at] = self._found(begin + at, worker, kind, offset, nbytes)
            times += took
            ends += ended
            seconds += elapsed
        end = ends[-1] if ends else perf_counter()
        del times[done - first :], ends[done - first :]
        lease.reported, lease.worker = done, worker
        if lease.begin is None:
            lease.begin = end - seconds
        if done == lease.size:
            del self._leases[lease.number]
        costly = bool(times) and max(times) > COSTLY_S
        known = _beside(others, done - first, costly=costly) if others else {}
        if costly:
            known.update(times=times, ends=ends)
        known["own_s"] = sum(times)
        return Report(*lease.number, worker, first, done, seconds, lease.begin, end, done == lease.size, **known)

    def _found(self, mark: int, worker: int, kind: int, offset: int, nbytes: int) -> TicketOutcome:
        """Returns what ``store_outcome`` has stored, and frees it where it is read here."""
        if kind in (BLOB, BATCH):
            return TicketOutcome(Blob(worker, ((offset, nbytes),), kind == BATCH))
        if kind == LOCAL:
            local: TicketOutcome = self._completions.local.pop(mark)
            return local
        return TicketOutcome(*self._loaded(worker, offset, nbytes))

    def _reads(self, worker: int, offset: int, nbytes: int) -> Iterator[TicketOutcome]:
        """Yields what ``store_reads`` has stored."""
        reads = self._loaded(worker, offset, nbytes)
        return (TicketOutcome(Features(Blob(worker, blocks), values)) for blocks, values in reads)

    def _loaded(self, worker: int, offset: int, nbytes: int) -> Any:
        """Returns what was pickled there, and gives the block back."""
        data = bytes(self._links.buffer(worker)[offset : offset + nbytes])
        self.give_back(worker, offset)
        return pickle.loads(data)


def _beside(others: dict[int, TicketOutcome], count: int, *, costly: bool) -> dict[str, Any]:
    """Returns what a report of so many samples says of those that are no plain rows: outcomes by offset."""
    prepared = 0
    layout: bytes | None = None
    items: list[Item] = [None] * count
    parts: list[Part | None] = [None] * count
    for at, (item, part, described, more) in others.items():
        items[at], parts[at], prepared = item, part, prepared + more
        layout = layout if described is None else described
    return {"items": items, "layout": layout, "prepared": prepared, "parts": parts if costly and any(parts) else None}
