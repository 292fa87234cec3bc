"""One worker without processes: tasks from a list, real arenas, a real board and real marks."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from minato_gpu.lanes.base import Failure, Piece, Report, Task
from minato_gpu.lanes.leases import Leases
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker import Worker
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.status_board import CHUNK, RUN
from minato_gpu.samples import Position


class Computed:
    """A data set: sample ``key`` is ``make(key)``."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __getitem__(self, key: Any) -> Any:
        return self.make(key)


@contextmanager
def open_links(
    workers: int = 1, *, addressed: bool = False, arenas: bool = True, active: int | None = None
) -> Iterator[WorkerChannels]:
    """Links that are closed again."""
    links = WorkerChannels(workers, addressed=addressed, arenas=arenas, active=active)
    try:
        yield links
    finally:
        links.close()


def job(dataset: Any, **changes: Any) -> Job:
    """A map-style data set, default_collate, one worker process, no pipeline."""
    parts: dict[str, Any] = {
        "dataset": dataset if not callable(dataset) else Computed(dataset),
        "collate_fn": default_collate,
        "auto_collation": True,
        "drop_last": False,
        "pipeline": None,
        "worker_init_fn": None,
        "num_workers": 1,
        "base_seed": 100,
        "seeds_samples": True,
    }
    return Job(**{**parts, **changes})


def piece(keys: Any, *, position: int = 0, slab: int = -1, joins: bool = False, **more: Any) -> Piece:
    """All tickets of a place with these keys."""
    keys = list(keys)
    return Piece(Position(position), keys, more.pop("occurrences", None), slab, len(keys), 0, joins, **more)


def task(*pieces: Piece, chunk: int = 1, kind: str = "run", layout: bytes | None = None, **more: Any) -> Task:
    """A task of run 1, epoch 0, seed 77."""
    return Task(1, chunk, kind, 0, 77, pieces, layout, **more)


def marked(links: WorkerChannels, sent: Task) -> Task:
    """The task with marks."""
    marks = [links.completions.reserve(len(each.keys)) for each in sent.pieces]
    return sent._replace(pieces=tuple(p._replace(marks=at) for p, at in zip(sent.pieces, marks, strict=True)))


def marked_task(links: WorkerChannels, keys: Sequence[int], chunk: int, run: int) -> Task:
    """A task of these keys with marks."""
    return marked(links, task(piece(keys), chunk=chunk)._replace(run=run))


class Bench:
    """A worker on links, run in this thread, and what its reports refer to."""

    def __init__(self, links: WorkerChannels, what: Job, *, number: int = 0) -> None:
        self.links = links
        self.job = what
        self.number = number
        arena = links.arenas[number] if links.arenas else None
        self.arena = arena
        self.store = Store(number, links, arena)
        self.tasks: list[Task] = []
        self.leases = Leases(links)
        self.worker = Worker(number, what, lambda: self.tasks.pop(0) if self.tasks else None, self.store, links)

    def give(self, *tasks: Task) -> None:
        """Let the worker find these tasks."""
        for each in tasks:
            sent = marked(self.links, each)
            self.leases.add(sent)
            self.tasks.append(sent)

    def told(self, *, unfinished: bool = False) -> list[Report]:
        """What the worker has told since the last call."""
        return self.leases.reports(unfinished=unfinished)

    def run(self, *tasks: Task) -> list[Report]:
        """All reports of these tasks."""
        self.give(*tasks)
        self.worker.run()
        return self.told()

    @contextmanager
    def running(self, *tasks: Task) -> Iterator[list[Report]]:
        """The same in a thread; the reports are there at the end, but for what was asked for meanwhile (``told``)."""
        self.give(*tasks)
        thread = threading.Thread(target=self.worker.run)
        thread.start()
        reports: list[Report] = []
        try:
            yield reports
        finally:
            thread.join()
            reports += self.told()

    def word(self, word: int) -> int:
        """A word of the worker's row on the board."""
        return int(self.links.board.words[self.links.board.row(self.number) + word])

    def revoke(self, keep: int) -> None:
        """Take back what the worker is at, from sample ``keep`` on, which it has not started."""
        task = self.word(RUN), self.word(CHUNK)
        kept = self.links.board.revoke(self.number, *task, keep)
        assert kept == keep
        self.leases.revoked(*task, kept, self.number)


class Slab:
    """Rows of the engine's arena for samples like ``sample``."""

    def __init__(self, links: WorkerChannels, sample: Any, rows: int) -> None:
        layout = Layout.of(sample)
        assert layout is not None
        self.layout, self.bytes, self.rows = layout, pickle.dumps(layout), rows
        self.nbytes = layout.offsets(rows)[1]
        self.offset = links.engine_arena.allocate(self.nbytes)
        self.owner = np.frombuffer(links.engine_arena.buffer, np.uint8, self.nbytes, self.offset)

    def batch(self, objects: list[list[Any]] | None = None) -> Any:
        """What the consumer would get."""
        return self.layout.batch(self.owner, self.rows, objects or [[]] * self.rows)


def items_of(reports: Sequence[Report]) -> list[Any]:
    """The references of all samples reported, in order; checks that reports follow each other without a gap."""
    items: list[Any] = []
    for report in reports:
        assert report.first == len(items)
        items += report.items if report.items is not None else [None] * (report.done - report.first)
        assert report.done == len(items)
    assert [report.final for report in reports] == [False] * (len(reports) - 1) + [True]
    return items


def draws() -> list[Any]:
    """One draw of each global generator."""
    return [torch.rand(()).item(), np.random.random_sample(), random.random()]


def values(bench: Bench, reports: list[Report]) -> list[Any]:
    """The samples that the reports refer to."""
    return [bench.store.get(item) for item in items_of(reports)]


def error_of(item: Any) -> tuple[type[BaseException], str]:
    """Type and text of a failure."""
    assert isinstance(item, Failure)
    try:
        item.error.reraise()
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


def a_sample(key: int) -> Any:
    """One that a slab takes."""
    return {"x": np.full(3, key, np.float32), "name": f"n{key}"}
