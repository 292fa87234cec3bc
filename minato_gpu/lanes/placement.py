"""Where a worker puts what it prepared: samples in their rows or as blobs, batches that are whole joined at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

from torch.utils.data import default_collate

from minato_gpu.lanes.base import (
    Extra,
    Failure,
    Features,
    Handed,
    Item,
    Joined,
    Laid,
    NoSample,
    Piece,
    Task,
    TicketOutcome,
    Unshippable,
    Yielded,
    failure,
)
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.progress import Progress
from minato_gpu.lanes.seeding import Seeder
from minato_gpu.lanes.store import Store
from minato_gpu.memory.layout import Layout, Mismatch
from minato_gpu.samples import Key, Origin, Value, sample_seed

Put = Callable[[int, Value], Item]
"""From an offset in the piece and its sample to the reference of where it was put."""


class Placement:
    """Puts a worker's samples and batches into ``store``. ``who``: the worker, for errors. ``seeder``: of a process."""

    def __init__(self, job: Job, store: Store, who: str, seeder: Seeder | None = None) -> None:
        self._job = job
        self._store = store
        self._who = who
        self._sends_all = job.auto_collation and job.collate_fn is default_collate
        self.own_collate = job.own_collate
        self._seeder = seeder
        self._learned: bytes | None = None

    def putter(self, task: Task, piece: Piece, progress: Progress) -> Put:
        """How to lay down the samples of a piece: in their rows where the layout is known, else as blobs."""
        store = self._store
        if not (self._job.auto_collation or piece.whole):
            return lambda at, value: self._put_item(task, piece, at, value)
        if piece.slab >= 0 and task.layout:
            write = store.layout(task.layout).writer(store.views(piece.slab, piece.rows, task.layout))
            first = piece.row

            def put_row(at: int, value: Value) -> Item:
                try:
                    objects = write(first + at, value)
                except Mismatch:
                    return self._shipped(task, piece, at, value)
                return None if objects is None else Extra(objects)

            return put_row

        def put_blob(at: int, value: Value) -> Item:
            self._learn(progress, value)
            return self._shipped(task, piece, at, value)

        return put_blob

    def _put_item(self, task: Task, piece: Piece, at: int, value: Value) -> Item:
        """A sample that is a batch by itself, converted."""
        item = self.joined([value], task, piece, at)
        return self._unsent_of(task, piece, {at: value}).get(at, item) if self._blames_samples(item) else item

    def _shipped(self, task: Task, piece: Piece, at: int, value: Value) -> Item:
        """Where a sample lies that is to be joined with others.

        One that cannot be sent has failed, unless a ``collate_fn`` of the user's own may make something of it here.
        """
        try:
            return self._store.put(value)
        except Exception as error:
            return self._unsent(task, piece, at, error) if self._sends_all else Unshippable()

    def _unsent(self, task: Task, piece: Piece, at: int, error: Exception) -> Failure:
        """This sample could not be pickled."""
        origin = Origin(task.epoch, piece.position_of(at), piece.keys[at], stage="send", lane=self._job.lane)
        return failure(error, f"{self._who} ({origin})", origin=origin)

    def unsent(self, task: Task, number: int, outcome: TicketOutcome, error: Exception) -> TicketOutcome:
        """What is said in the place of an outcome that could not be sent: of sample ``number`` of the task, or of a
        batch. Text and bytes of a sample may be more than the worker has memory for."""
        item = outcome.item
        inner = item.item if isinstance(item, (Joined, Yielded)) else item
        self._store.discard(item.fields if isinstance(item, (Features, Handed)) else inner)
        if task.mark >= 0 or getattr(inner, "collated", False):
            failed = self.batch_failure(error, "send", task.epoch, stage="send")
        else:
            failed = self._unsent(task, *task.find(number), error)
        return outcome._replace(item=replace(item, item=failed) if isinstance(item, Yielded) else failed)

    def _learn(self, progress: Progress, sample: Value) -> None:
        """Describe the sample to the engine as long as it does not know the layout."""
        if progress.task.layout == b"" and not progress.has_described:
            if self._learned is None:
                self._learned = _described(sample)
            progress.layout, progress.has_described = self._learned, True

    def join(self, progress: Progress, piece: Piece, samples: list[Value]) -> None:
        """Collate a batch whose samples were all prepared here; hand them over singly if it was cut short."""
        task, items = progress.task, progress.items
        empty = isinstance(piece.keys[0], NoSample)
        prepared = [at for at, item in enumerate(items) if not isinstance(item, Failure)]
        failed = len(prepared) < len(items)
        if not items or (failed and not self._job.skips) or not (samples or empty):
            return
        if empty:
            items[0] = self.joined([], task, piece)
            return
        by_offset, unsent = dict(zip(prepared, samples, strict=True)), dict[int, Failure]()
        if len(samples) == len(piece.keys):
            self._learn(progress, samples[0])
            items[0] = item = self.joined(samples, task, piece)
            unsent = self._unsent_of(task, piece, by_offset) if self._blames_samples(item) else {}
            if not unsent:
                return
        # joined later: without those that failed, or together with the rest of a batch that was cut short
        for at, sample in by_offset.items():
            items[at] = unsent[at] if at in unsent else self._shipped(task, piece, at, sample)

    def alone(self, task: Task, samples: dict[int, Value], bad: list[Failure]) -> Laid | Joined | Failure | None:
        """A batch of samples that only this worker has, by their offsets; ``bad`` are those that failed.

        Where samples may be left out, it comes without them and without those that cannot be sent.
        """
        piece = task.pieces[0]
        if bad and (bad[0].collated or not self._job.skips):
            return replace(bad[0], collated=True)
        item = self.joined(list(samples.values()), task, piece) if samples else None
        unsent = self._unsent_of(task, piece, samples) if self._blames_samples(item) else {}
        if unsent:
            rest = {at: value for at, value in samples.items() if at not in unsent}
            return self.alone(task, rest, [*bad, *unsent.values()])
        return Joined(item, bad) if bad else item

    def _blames_samples(self, item: Item) -> bool:
        """Whether one of its samples may be to blame for a batch's failure: not for what a ``collate_fn`` raised."""
        if not isinstance(item, Failure) or item.origin is None:
            return False
        return item.origin.stage == "send" or (self._job.skips and self._sends_all)

    def _unsent_of(self, task: Task, piece: Piece, samples: dict[int, Value]) -> dict[int, Failure]:
        """Those of the samples, by their offsets, that cannot be sent."""
        found = {}
        for at, sample in samples.items():
            try:
                self._store.discard(self._store.put(sample))
            except Exception as error:
                found[at] = self._unsent(task, piece, at, error)
        return found

    def joined(self, samples: list[Value], task: Task, piece: Piece, at: int | None = None) -> Laid | Failure:
        """What the ``collate_fn`` makes of them, or of number ``at`` of the piece alone. What it draws is the batch's
        own: whoever joins it, and whatever that worker did before."""
        stage, hint = "collate", ""
        if self.own_collate and self._seeder is not None:
            self._seeder.seed_batch(sample_seed(task.seed, 0, "collate_fn", piece.position_of(at or 0)))
        try:
            batch = self._job.collate_fn(samples if self._job.auto_collation else samples[0])
            stage = "send"
            return self._store.put(batch, collated=True)
        except Exception as error:
            if self._job.collate_fn is default_collate and "equal size" in str(error):
                hint = ": samples of different shapes need a collate_fn that pads them"
            if at is not None:
                piece = piece._replace(position=piece.position_of(at), keys=[piece.keys[at]], positions=None)
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
    """The pickled layout of a sample; empty where it has none, or is of a class that cannot be pickled."""
    layout = Layout.of(sample)
    try:
        return b"" if layout is None else pickle.dumps(layout)
    except Exception:
        return b""


def _short(keys: list[Key]) -> str:
    text = repr(keys)
    return text if len(text) <= 120 else text[:117] + "..."
