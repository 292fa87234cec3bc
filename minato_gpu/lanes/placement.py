"""Where a worker puts what it prepared: samples in their rows or as blobs, batches that are whole joined at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from minato_gpu.lanes.base import Extra, Failure, NoSample, Piece, Task, Unshippable, failure
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.progress import Progress
from minato_gpu.lanes.store import Store
from minato_gpu.memory.layout import Layout, Mismatch

Put = Callable[[int, Any], Any]
"""From an offset in the piece and its sample to the reference of where it was put."""


class Placement:
    """Puts a worker's samples and batches into ``store``. ``who``: the worker, for errors."""

    def __init__(self, job: Job, store: Store, who: str) -> None:
        self._job = job
        self._store = store
        self._who = who
        self._learned: bytes | None = None

    def putter(self, task: Task, piece: Piece, progress: Progress) -> Put:
        """How to lay down the samples of a piece: in their rows where the layout is known, else as blobs."""
        store = self._store
        if piece.slab >= 0 and task.layout:
            write = store.layout(task.layout).writer(store.views(piece.slab, piece.rows, task.layout))
            first = piece.row

            def put_row(at: int, value: Any) -> Any:
                try:
                    objects = write(first + at, value)
                except Mismatch:
                    return self._shipped(value)
                return None if objects is None else Extra(objects)

            return put_row

        def put_blob(at: int, value: Any) -> Any:
            self._learn(progress, value)
            return self._shipped(value)

        return put_blob

    def _shipped(self, value: Any) -> Any:
        try:
            return self._store.put(value)
        except (pickle.PicklingError, AttributeError, TypeError):
            return Unshippable()

    def _learn(self, progress: Progress, sample: Any) -> None:
        """Describe the sample to the engine as long as it does not know the layout."""
        if progress.task.layout == b"":
            if self._learned is None:
                layout = Layout.of(sample)
                self._learned = b"" if layout is None else pickle.dumps(layout)
            progress.layout = self._learned

    def join(self, progress: Progress, piece: Piece, start: int, samples: list[Any]) -> None:
        """Collate a batch whose samples were all prepared here; hand them over singly if it was cut short.

        ``start``: where its references begin among those that are not reported.
        """
        empty = isinstance(piece.keys[0], NoSample)
        if any(isinstance(item, Failure) for item in progress.items[start:]):
            if self._job.skips:  # the others are joined later, without those that failed
                good = iter(samples)
                for at, item in enumerate(progress.items[start:], start=start):
                    if not isinstance(item, Failure):
                        progress.items[at] = self._shipped(next(good))
            return
        if not (samples or empty):
            return
        if empty:
            progress.items[start] = self.joined([], progress.task.epoch, piece)
            return
        if len(samples) == len(piece.keys):
            self._learn(progress, samples[0])
            progress.items[start] = self.joined(samples, progress.task.epoch, piece)
            return
        for at, sample in enumerate(samples, start=start):
            progress.items[at] = self._shipped(sample)

    def joined(self, samples: list[Any], epoch: int, piece: Piece) -> Any:
        try:
            batch = self._job.collate_fn(samples if self._job.auto_collation else samples[0])
            return self._store.put(batch, collated=True)
        except Exception as error:
            ragged = self._job.collate_fn is default_collate and "equal size" in str(error)
            hint = ": samples of different shapes need a collate_fn that pads them" if ragged else ""
            return self.batch_failure(error, f"collate{hint}", epoch, piece)

    def batch_failure(self, error: Exception, what: str, epoch: int, piece: Piece | None = None) -> Failure:
        parts = [what, f"epoch {epoch}"]
        if piece is not None:
            positions = sorted(piece.position_of(at) for at in range(len(piece.keys)))
            parts += [f"positions {positions[0]} to {positions[-1]}", f"indices {_short(piece.keys)}"]
        return failure(error, f"{self._who} ({', '.join(parts)}, lane cpu)", collated=True)


def _short(keys: list[Any]) -> str:
    text = repr(keys)
    return text if len(text) <= 120 else text[:117] + "..."
