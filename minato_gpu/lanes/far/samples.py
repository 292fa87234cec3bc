"""A task's samples as both ends send and store them: the memory that a report's rows are in, and blobs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minato_gpu.lanes.base import Blob, Handed, Item, Report, Task
from minato_gpu.lanes.store import Store


def pieces_of(task: Task, report: Report) -> Iterator[tuple[int, int, int]]:
    """Yields a report's samples by piece of the task: its number, and from which of its samples to which; none that has
    no sample."""
    first, stop = report.first, report.done
    for number, piece in enumerate(task.pieces):
        size = len(piece.keys)
        if max(first, 0) < min(stop, size):
            yield number, max(first, 0), min(stop, size)
        first, stop = first - size, stop - size


def rows_of(task: Task, report: Report, store: Store) -> list[memoryview]:
    """Returns the memory of a report's rows, leaf by leaf: of all samples, where any may be stored there."""
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
    """Returns what is stored in an arena for a sample, a batch, or a part of a sample."""
    stored = item.fields if isinstance(item, Handed) else item
    return stored if isinstance(stored, Blob) else None
