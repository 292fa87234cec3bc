"""A task's samples as both ends send and store them: the memory that a report's rows are in, and blobs.

Samples that arrive from an agent are stored where a worker here would put them, and marked as it would: they go into
rows of their place or the engine's arena, and marks (memory/completions.py) make reports and wake whoever waits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minato_gpu.lanes.base import Blob, Handed, Item, Report, Task, TicketOutcome
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.completions import IN_ROW, LOCAL, Location


def pieces_of(task: Task, report: Report) -> Iterator[tuple[int, int, int]]:
    """Yields each piece of the task that has samples in the report: its number, and the range of these samples in it
    (first, end)."""
    first, stop = report.first, report.done
    for number, piece in enumerate(task.pieces):
        size = len(piece.keys)
        if max(first, 0) < min(stop, size):
            yield number, max(first, 0), min(stop, size)
        first, stop = first - size, stop - size


def rows_of(task: Task, report: Report, store: Store) -> list[memoryview]:
    """Returns the memory of the rows of a report's samples, leaf by leaf, whether or not each one is in its row.

    Empty where all of them are blobs, or the task has no rows.
    """
    found: list[memoryview] = []
    if report.items is not None and all(blob_of(item) is not None for item in report.items):
        return found
    for number, begin, end in pieces_of(task, report):
        piece = task.pieces[number]
        if piece.slab >= 0 and task.layout:
            leaves = store.views(piece.slab, piece.rows, task.layout)
            which = slice(piece.row + begin, piece.row + end)
            found += [
                leaf[which].reshape(-1).view(np.uint8).data for leaf in leaves if leaf is not None and leaf.nbytes
            ]
    return found


def blob_of(item: Item) -> Blob | None:
    """Returns the blob of a sample, a batch, or a part of a sample; None if it is none."""
    stored = item.fields if isinstance(item, Handed) else item
    return stored if isinstance(stored, Blob) else None


class Arrivals:
    """The samples that arrive from one agent: a frame's samples are placed, received, then marked."""

    def __init__(self, links: WorkerChannels) -> None:
        self._links, self._store = links, Store(-1, links)
        self._placing: list[int] = []  # blocks of the frame that is being received

    def place(self, task: Task, report: Report) -> list[memoryview]:
        """Returns the memory for a frame's body: rows, and new blocks of the engine's arena, which take the place of
        the agent's in ``report`` itself."""
        views, arena = rows_of(task, report, self._store), self._links.engine_arena
        for at, item in enumerate(report.items or ()):
            if (blob := blob_of(item)) is not None:
                blocks = [(arena.allocate(nbytes), nbytes) for _, nbytes in blob.blocks]
                self._placing += [offset for offset, _ in blocks]
                views += [arena.buffer[offset : offset + nbytes] for offset, nbytes in blocks]
                placed = Blob(-1, tuple(blocks), blob.collated)
                assert report.items is not None
                report.items[at] = Handed(placed, item.stage) if isinstance(item, Handed) else placed
        return views

    def drop(self) -> None:
        """Frees the memory of a frame that has not arrived as a whole."""
        for offset in self._placing:
            self._links.engine_arena.free(offset)
        self._placing = []

    def mark(self, task: Task, report: Report, clock_s: float) -> None:
        """Marks a report's samples, which are stored. ``clock_s``: to be added to its times."""
        self._placing = []
        samples, runs = report.done - report.first, [*pieces_of(task, report)]
        locations = self._locations(task, report, runs)
        times = report.times or [(report.own_s or 0.0) / samples] * samples if samples else []
        ends = [end + clock_s for end in report.ends or [report.end] * samples]
        elapsed, stop = report.seconds, samples
        for piece, begin, end in reversed(runs):
            at = stop - (end - begin)  # the last first: where the first is marked, all are
            which, mark = slice(at, stop), task.pieces[piece].marks + begin
            when = ends[at] if stop == at + 1 else ends[which]
            where = None if locations is None else locations[which]
            self._links.bell.publish(mark, times[which], when, elapsed, report.worker, where)
            elapsed, stop = 0.0, at

    def _locations(self, task: Task, report: Report, runs: list[tuple[int, int, int]]) -> list[Location] | None:
        """Returns each sample's location (see leases.py); None: all are plain rows."""
        if not runs or (report.items is None and report.parts is None and report.layout is None):
            return None
        marks = [task.pieces[number].marks + at for number, begin, end in runs for at in range(begin, end)]
        nothing = [None] * len(marks)
        outcomes = list(map(TicketOutcome, report.items or nothing, report.parts or nothing))
        outcomes[0] = outcomes[0]._replace(layout=report.layout)
        odd = {mark: outcome for mark, outcome in zip(marks, outcomes, strict=True) if outcome != TicketOutcome(None)}
        self._links.completions.local |= odd
        return [(LOCAL, 0, 0) if mark in odd else IN_ROW for mark in marks]
