"""Placement of a worker's results: samples in their rows or as blobs, batches that are whole joined at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

from torch.utils.data import default_collate

from minato_gpu.lanes.base import (
    Extra,
    Failure,
    Item,
    NoSample,
    Piece,
    Stored,
    Task,
    TicketOutcome,
    Yielded,
    failure,
    stored_part,
)
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.progress import LeaseProgress
from minato_gpu.lanes.seeding import Seeder
from minato_gpu.lanes.store import Store
from minato_gpu.memory.layout import Layout, Mismatch, Views
from minato_gpu.samples import Key, Origin, Value, sample_seed

Put = Callable[[int, Value], Item]
"""A function that stores a sample, by its offset in the piece, and returns where."""


class Placement:
    """Puts a worker's samples and batches into ``store``. ``who``: the worker, for errors.

    ``seeder`` seeds the global generators of a worker process; None in a worker thread.
    """

    def __init__(self, job: Job, store: Store, who: str, seeder: Seeder | None) -> None:
        self._job = job
        self._store = store
        self._who = who
        self._sends_all = job.auto_collation and job.collate_fn is default_collate
        self.own_collate = job.own_collate
        self._seeder = seeder
        self._learned: bytes | None = None

    def putter(self, task: Task, piece: Piece, progress: LeaseProgress) -> Put:
        """Returns a function that stores the samples of a piece: in their rows if the layout is known, else as
        blobs."""
        store = self._store
        if not self._job.auto_collation:
            return lambda at, value: self._put_item(task, piece, at, value)
        if piece.slab >= 0 and task.layout:
            layout, first = store.layout(task.layout), piece.row
            views = store.views(piece.slab, piece.rows, task.layout)
            if layout.stacks and not task.credit:  # a task with a credit counts bytes after each sample
                return self._stacker(task, piece, progress, layout, views)
            write = layout.writer(views)

            def put_row(at: int, value: Value) -> Item:
                try:
                    objects = write(first + at, value)
                except Mismatch:
                    return self._stored(task, piece, at, value)
                return None if objects is None else Extra(objects)

            return put_row

        def put_blob(at: int, value: Value) -> Item:
            self._learn(progress, value)
            return self._stored(task, piece, at, value)

        return put_blob

    def _stacker(self, task: Task, piece: Piece, progress: LeaseProgress, layout: Layout, views: Views) -> Put:
        """Returns a function that keeps samples until, before they are reported, they are written into their rows
        together."""
        items, first, kept = progress.items, piece.row, list[tuple[int, int, Value]]()

        def keep(at: int, value: Value) -> Item:
            kept.append((len(items), at, value))
            return None

        def write() -> None:
            if not kept:
                return
            row = first + kept[0][1]
            together = kept[-1][1] - kept[0][1] == len(kept) - 1  # none in between has failed, so rows are consecutive
            if not (together and layout.write_rows(views, row, [value for _, _, value in kept])):
                for number, at, value in kept:
                    try:
                        layout.write(views, first + at, value)
                    except Mismatch:
                        items[number] = self._stored(task, piece, at, value)
            kept.clear()

        progress.write_rows = write
        return keep

    def _put_item(self, task: Task, piece: Piece, at: int, value: Value) -> Item:
        """Collates and stores a sample that is a batch by itself; returns where, or its failure."""
        item = self.joined([value], task, piece.only([at]))
        return self._unsent_of(task, piece, {at: value}).get(at, item) if self._blames_samples(item) else item

    def _stored(self, task: Task, piece: Piece, at: int, value: Value) -> Item:
        """Stores a sample that is to be joined with others; returns where.

        One that cannot be pickled has failed, unless a ``collate_fn`` of the user's own may make something of it: then
        it is stored nowhere, and prepared again by the worker that joins it.
        """
        try:
            return self._store.put(value)
        except Exception as error:
            return self._unsent(task, piece, at, error) if self._sends_all else None

    def _unsent(self, task: Task, piece: Piece, at: int, error: Exception) -> Failure:
        """Returns the failure of a sample that could not be pickled."""
        origin = Origin(task.epoch, piece.position_of(at), piece.keys[at], stage="send", lane=self._job.lane)
        return failure(error, f"{self._who} ({origin})", origin=origin)

    def unsent(self, task: Task, number: int, outcome: TicketOutcome, error: Exception) -> TicketOutcome:
        """Discards an outcome that could not be sent, of sample ``number`` of the task, or of a batch.

        Returns an outcome with the failure instead. (Text and bytes of a sample may be more than there is memory for.)
        """
        item = outcome.item
        stored = stored_part(item)
        self._store.discard(stored)
        if task.kind == "next" or getattr(stored, "collated", False):
            failed = self.batch_failure(error, "send", task.epoch, stage="send")
        else:
            failed = self._unsent(task, *task.find(number), error)
        return outcome._replace(item=replace(item, item=failed) if isinstance(item, Yielded) else failed)

    def _learn(self, progress: LeaseProgress, sample: Value) -> None:
        """Has the sample's layout reported, once in a task, while the engine knows none."""
        if progress.task.layout == b"" and not progress.has_described:
            if self._learned is None:
                self._learned = _described(sample)
            progress.layout, progress.has_described = self._learned, True

    def join(self, progress: LeaseProgress, piece: Piece, samples: list[Value]) -> None:
        """Collates a batch once its ``samples`` are ready, those that have not failed. If the task was cut short, so
        that some are missing, those that are there are stored singly.

        The batch's ``Item`` takes the place of its first sample's. Where samples may be left out, the batch comes
        without those that failed, and those that cannot be sent.
        """
        task, items = progress.task, progress.items
        if isinstance(piece.keys[0], NoSample):
            items[:1] = [self.joined([], task, piece)][: len(items)]
            return
        left = dict(zip([at for at, item in enumerate(items) if item is None], samples, strict=True))
        if len(items) < len(piece.keys):  # what is missing is prepared by another, and then a job joins them
            for at, sample in left.items():
                items[at] = self._stored(task, piece, at, sample)
            return
        if left:
            self._learn(progress, samples[0])
        while left and (self._job.skips or len(left) == len(items)):
            item = self.joined([*left.values()], task, piece if len(left) == len(items) else piece.only(left))
            unsent = self._unsent_of(task, piece, left) if self._blames_samples(item) else {}
            if not unsent:
                items[min(left)] = item
                return
            for at, failed in unsent.items():
                items[at] = failed
                del left[at]

    def _blames_samples(self, item: Item) -> bool:
        """Returns whether a sample may be to blame for a failure: not where a user's own ``collate_fn`` raised."""
        if not isinstance(item, Failure) or item.origin is None:
            return False
        return item.origin.stage == "send" or (self._job.skips and self._sends_all)

    def _unsent_of(self, task: Task, piece: Piece, samples: dict[int, Value]) -> dict[int, Failure]:
        """Returns the failures of those samples, by offset, that cannot be pickled."""
        found = {}
        for at, sample in samples.items():
            try:
                self._store.discard(self._store.put(sample))
            except Exception as error:
                found[at] = self._unsent(task, piece, at, error)
        return found

    def joined(self, samples: list[Value], task: Task, piece: Piece) -> Stored | Failure:
        """Stores what the ``collate_fn`` makes of these samples of the piece; returns where, or the batch's failure.

        In worker processes a user's own ``collate_fn`` draws the same numbers whichever worker joins the batch.
        """
        stage, hint = "collate", ""
        if self.own_collate and self._seeder is not None:
            self._seeder.seed_batch(sample_seed(task.seed, 0, "collate_fn", piece.position_of(0)))
        try:
            batch = self._job.collate_fn(samples if self._job.auto_collation else samples[0])
            stage = "send"
            return self._store.put(batch, collated=True)
        except Exception as error:
            if self._job.collate_fn is default_collate and "equal size" in str(error):
                hint = ": samples of different shapes need a collate_fn that pads them"
            return self.batch_failure(error, f"{stage}{hint}", task.epoch, piece, stage)

    def batch_failure(
        self, error: Exception, what: str, epoch: int, piece: Piece | None = None, stage: str | None = None
    ) -> Failure:
        parts = [what, f"epoch {epoch}"]
        if piece is not None:
            positions = sorted(piece.position_of(at) for at in range(len(piece.keys)))
            parts += [f"positions {positions[0]} to {positions[-1]}", f"indices {_short(piece.keys)}"]
        origin = Origin(epoch, stage=stage, lane=self._job.lane)
        return failure(error, f"{self._who} ({', '.join(parts)}, lane {self._job.lane})", collated=True, origin=origin)


def _described(sample: Value) -> bytes:
    """Returns the pickled layout of a sample; empty if it has none, or is of a class that cannot be pickled."""
    layout = Layout.of(sample)
    try:
        return b"" if layout is None else pickle.dumps(layout)
    except Exception:
        return b""


def _short(keys: list[Key]) -> str:
    text = repr(keys)
    return text if len(text) <= 120 else text[:117] + "..."
