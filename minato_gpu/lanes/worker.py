"""What a CPU worker does with a task: prepare samples, put each where it belongs, report.

The same code runs in a process and in a thread. One sample's failure is that sample's alone. A worker shows on the
board which sample it is at, so that a slow one is noticed while it runs and what waits behind it can be given to
others. Finished samples are reported when the chunk ends, at the first sample boundary a few milliseconds after the
last report, or when the engine *pokes* the worker because a slow sample is keeping the others from being reported.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from minato_gpu.lanes.base import Extra, Failure, NoSample, Piece, Task, Unshippable, failure
from minato_gpu.lanes.delay import RunQueueDelay
from minato_gpu.lanes.produce import Job, Produce, Producer
from minato_gpu.lanes.progress import Progress
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.wire import Channel
from minato_gpu.memory.board import CHUNK, LIMIT, NO_LIMIT, RUN, SINCE_NS, STARTED, Board
from minato_gpu.memory.layout import Layout, Mismatch

_SINCE_S = 50e-6  # the board says that precisely how long a sample has been running

Put = Callable[[int, Any], Any]
"""From an offset in the piece and its sample to the reference of where it was put."""


class Worker:
    """Worker ``number``: ``run`` takes tasks until the channel ends."""

    def __init__(self, number: int, job: Job, channel: Channel, store: Store, board: Board, poke: int) -> None:
        self._number = number
        self._job = job
        self._channel = channel
        self._store = store
        self._board = board
        self._words = board.words
        self._row = board.row(number)
        self._producer = Producer(number, job, store)
        self._stream: Any = None
        self._stream_of: tuple[int, int] | None = None
        self._learned: bytes | None = None
        self._poke = poke  # an event descriptor
        self._lock = threading.Lock()  # over the progress below, which the watcher reports from
        self._open: tuple[Progress, bool] | None = None  # a chunk that may be reported at any time; unseeded?
        self._watcher: threading.Thread | None = None
        self._ended = False

    def run(self) -> None:
        """Serve until the engine ends the channel."""
        kinds = {"run": self._prepare, "inspect": self._inspect, "collate": self._collate, "next": self._next}
        words, row, delay = self._words, self._row, RunQueueDelay()
        while (task := self._channel.receive()) is not None:
            progress = Progress(task, delay)
            words[row + LIMIT] = NO_LIMIT
            words[row + STARTED] = 0
            words[row + RUN] = task.run
            words[row + CHUNK] = task.chunk
            status = kinds[task.kind](task, progress)
            words[row + CHUNK] = -1
            self._report(progress, final=True, status=status)
            del task, progress
        delay.close()
        self._end()

    # --- kinds of task -------------------------------------------------------------------------------------

    def _prepare(self, task: Task, progress: Progress) -> str:
        """Samples of a map-style data set, with or without a pipeline."""
        unseeded = self._producer.begin_unseeded(progress.size)
        if not self._attempt(task, progress, unseeded):
            for item in progress.rewind():
                self._store.discard(item)
            self._attempt(task, progress, False)
        return ""

    def _open_to_pokes(self, progress: tuple[Progress, bool] | None) -> None:
        """From now on the watcher may report what is finished of this chunk (of none)."""
        with self._lock:
            self._open = progress
        if progress is not None and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="minato-watcher", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        """Answer pokes. A chunk whose samples may have drawn random numbers unseeded stays unreported."""
        while not self._ended:
            os.eventfd_read(self._poke)
            with self._lock:
                if self._open is not None:
                    progress, unseeded = self._open
                    ready = len(progress.times)  # before the check: what is added after it may have drawn
                    if ready and not (unseeded and self._moved()):
                        self._channel.send(progress.report(self._number, final=False, ready=ready))

    def _end(self) -> None:
        self._ended = True
        if self._watcher is not None:
            os.eventfd_write(self._poke, 1)
            self._watcher.join()

    def _inspect(self, task: Task, progress: Progress) -> str:
        for piece in task.pieces:
            for at in range(len(piece.keys)):
                try:
                    item: Any = self._producer.inspect(task, piece, at)
                except Exception as error:
                    item = self._producer.failure(task, piece, at, error)
                progress.add(item)
        return ""

    def _collate(self, task: Task, progress: Progress) -> str:
        """Join samples that other workers prepared, or that could not be sent between processes."""
        piece = task.pieces[0]
        if task.items is not None:
            progress.add(self._joined([self._store.get(item) for item in task.items], task.epoch, piece))
            return ""
        produce, samples = self._producer.of(task, piece, False), []
        for at in range(len(piece.keys)):
            try:
                samples.append(produce(at))
            except Exception as error:
                progress.add(replace(self._producer.failure(task, piece, at, error), collated=True))
                return ""
        progress.add(self._joined(samples, task.epoch, piece))
        return ""

    def _next(self, task: Task, progress: Progress) -> str:
        """The next batch of this worker's own stream, as PyTorch's worker would fetch it."""
        status = ""
        item: Any = None
        try:
            self._producer.check_started()
            if self._stream_of != (task.run, task.epoch):
                job = self._job
                self._stream_of = (task.run, task.epoch)
                self._stream = _IterableDatasetFetcher(job.dataset, job.auto_collation, job.collate_fn, job.drop_last)
            if self._stream is None:
                raise StopIteration
            item = self._store.put(self._stream.fetch([None] * task.items), collated=True)
        except StopIteration:
            status, self._stream = "exhausted", None
        except Exception as error:
            item = self._batch_failure(error, "iterating the data set", task.epoch)
        progress.add(item)
        return status

    # --- samples -------------------------------------------------------------------------------------------

    def _attempt(self, task: Task, progress: Progress, unseeded: bool) -> bool:
        """Prepare what is not reported; False when it must be done again because unseeded samples drew."""
        skip, before = progress.reported, 0
        for piece in task.pieces:
            size = len(piece.keys)
            if skip >= size:
                skip, before = skip - size, before + size
                continue
            whole = piece.whole and piece.slab < 0
            samples: list[Any] = []
            start = len(progress.items)
            self._open_to_pokes(None if whole or progress.size == 1 else (progress, unseeded))
            produce = self._producer.of(task, piece, unseeded)
            put = _append_to(samples) if whole else self._putter(task, progress, piece)
            if isinstance(piece.keys[0], NoSample):
                produce = put = _nothing
            while skip < size and self._go_on(progress, piece, skip, produce, put, to_end=whole):
                if not self._publish(progress, unseeded):
                    return False
                skip = progress.done - before
            before, skip = before + size, 0
            if whole:
                self._join(progress, piece, start, samples)
                if progress.now > progress.report_at and not self._publish(progress, unseeded):
                    return False
        with self._lock:
            self._open = None
        return not (unseeded and self._moved())

    def _go_on(
        self, progress: Progress, piece: Piece, first: int, produce: Produce, put: Put, *, to_end: bool
    ) -> bool:
        """Prepare samples ``first`` and on of the piece, to its end or where it is revoked; True when stopping before
        that because a report is due. Nothing here is called that need not be: cheap samples come by the hundred."""
        words, started, limit, since = self._words, self._row + STARTED, self._row + LIMIT, self._row + SINCE_NS
        fence, unfence = self._board.barrier.acquire, self._board.barrier.release
        now, done, delayed, shown = progress.now, progress.done, progress.delayed, 0.0
        ready, took = progress.items.append, progress.times.append
        for at in range(first, len(piece.keys)):
            words[started] = done + 1
            if now > shown:
                words[since] = int(1e9 * now)
                shown = now + _SINCE_S
            fence()
            unfence()
            if done >= words[limit]:
                return False
            try:
                item = put(at, produce(at))
            except Exception as error:
                item = self._producer.failure(progress.task, piece, at, error)
            if delayed:
                progress.add(item)
                now = progress.now
            else:
                before, now = now, perf_counter()
                ready(item)
                progress.now = now
                took(now - before)
            done += 1
            progress.done = done
            if now > progress.report_at and not to_end:
                return True
        return False

    def _putter(self, task: Task, progress: Progress, piece: Piece) -> Put:
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

    def _join(self, progress: Progress, piece: Piece, start: int, samples: list[Any]) -> None:
        """Collate a batch whose samples were all prepared here; hand them over singly if it was cut short.

        ``start``: where its references begin among those that are not reported.
        """
        empty = isinstance(piece.keys[0], NoSample)
        if any(isinstance(item, Failure) for item in progress.items[start:]) or not (samples or empty):
            return
        if empty:
            progress.items[start] = self._joined([], progress.task.epoch, piece)
            return
        if len(samples) == len(piece.keys):
            self._learn(progress, samples[0])
            progress.items[start] = self._joined(samples, progress.task.epoch, piece)
            return
        for at, sample in enumerate(samples, start=start):
            progress.items[at] = self._shipped(sample)

    def _joined(self, samples: list[Any], epoch: int, piece: Piece) -> Any:
        try:
            batch = self._job.collate_fn(samples if self._job.auto_collation else samples[0])
            return self._store.put(batch, collated=True)
        except Exception as error:
            return self._batch_failure(error, "collate", epoch, piece)

    def _batch_failure(self, error: Exception, what: str, epoch: int, piece: Piece | None = None) -> Failure:
        parts = [what, f"epoch {epoch}"]
        if piece is not None:
            positions = sorted(piece.position_of(at) for at in range(len(piece.keys)))
            parts += [f"positions {positions[0]} to {positions[-1]}", f"indices {_short(piece.keys)}"]
        return failure(error, f"{self._producer.who} ({', '.join(parts)}, lane cpu)", collated=True)

    # --- reports -------------------------------------------------------------------------------------------

    def _moved(self) -> bool:
        seeder = self._producer.seeder
        return seeder is not None and seeder.moved()

    def _publish(self, progress: Progress, unseeded: bool) -> bool:
        """Report in between; False when samples prepared without seeds drew, and must not be reported."""
        with self._lock:
            if unseeded and self._moved():
                self._open = None
                return False
            if progress.done < progress.size:
                self._report(progress, final=False)
        return True

    def _report(self, progress: Progress, *, final: bool, status: str = "") -> None:
        self._channel.send(progress.report(self._number, final=final, status=status))


def _append_to(samples: list[Any]) -> Put:
    return lambda at, value: samples.append(value)


def _nothing(*_: Any) -> None:
    """The sample of an empty batch."""


def _short(keys: list[Any]) -> str:
    text = repr(keys)
    return text if len(text) <= 120 else text[:117] + "..."
