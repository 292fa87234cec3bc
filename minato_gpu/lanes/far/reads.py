"""Reads the sources of an agent's tasks ahead, by a reader process as a loader has one, before workers begin them."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

from minato_gpu.lanes import forking
from minato_gpu.lanes.base import Task
from minato_gpu.lanes.contract import Number
from minato_gpu.sources.process import ReaderSettings
from minato_gpu.sources.reader import Outbox, Reader
from minato_gpu.sources.reading import Place
from minato_gpu.sources.source import Key, Source, SourceOf

_FORK = multiprocessing.get_context("fork")


class TaskReads:
    """Reads the bytes of tasks' samples ahead, on the agent's machine. ``declared``: the data set's ``source``."""

    def __init__(self, declared: SourceOf, workers: int) -> None:
        self.reader = Reader(partial(forking.start_reader, _FORK), ReaderSettings(workers=workers), stays=False)
        self._declared = declared
        self._outbox = Outbox()
        self._tickets: dict[Number, range] = {}  # tickets of each task, numbered as tasks come
        self._next = 0
        # places of a ticket's bytes, once they have arrived; else None
        self._here: dict[int, tuple[Place, ...] | None] = {}

    def want(self, task: Task) -> None:
        """Asks for the bytes of a task's samples."""
        keys = [key for piece in task.pieces for key in piece.keys]
        tickets = self._tickets[task.run, task.chunk] = range(self._next, self._next + len(keys))
        self._next = tickets.stop
        self._here |= dict.fromkeys(tickets)
        wanted = [(ticket, -1, self._sources(key)) for ticket, key in zip(tickets, keys, strict=True)]
        self._outbox.want(tickets.start, wanted)
        self.reader.send(self._outbox)

    def _sources(self, key: Any) -> tuple[Key, ...]:
        try:
            found = self._declared(key)
            return tuple(each.key for each in ((found,) if isinstance(found, Source) else found))
        except Exception:  # the worker reads for itself
            return ()

    def receive(self) -> None:
        """Takes in which bytes have arrived. Raises ConnectionError where the reader process has ended."""
        arrived = self.reader.receive()
        if arrived is None:
            raise ConnectionError("the process that reads ahead has ended")
        self._here |= {ticket: places for ticket, places in arrived if ticket in self._here}

    def filled(self, task: Task) -> Task | None:
        """Returns the task with the places of its samples' bytes (``fetched``); None while some have not arrived."""
        tickets = iter(self._tickets[task.run, task.chunk])
        pieces = []
        for piece in task.pieces:
            places = [self._here[next(tickets)] for _ in piece.keys]
            fetched = [each for each in places if each is not None]
            if len(fetched) < len(places):
                return None
            pieces.append(piece._replace(fetched=fetched))
        return task._replace(pieces=tuple(pieces))

    def release(self, task: Task) -> None:
        """Releases the bytes of a task that has ended."""
        for ticket in self._tickets.pop((task.run, task.chunk)):
            self._outbox.release(ticket, self._here.pop(ticket) or ())
        self.reader.send(self._outbox)
