"""What a CPU worker does with a task: prepare samples, put each where it belongs, report.

The same code runs in a process and in a thread. One sample's failure is that sample's alone. A worker shows on the
board which sample it is at, so that a slow one is noticed while it runs and what waits behind it can be given to
others. Finished samples are reported when the chunk ends, at the first sample boundary a few milliseconds after the
last report, or when the engine *pokes* the worker because a slow sample is keeping the others from being reported.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from time import perf_counter
from typing import Any

from minato_gpu.lanes.base import Failure, Handed, NoSample, Piece, Report, Task
from minato_gpu.lanes.delay import RunQueueDelay
from minato_gpu.lanes.placement import Placement, Put
from minato_gpu.lanes.produce import Job, Produce, Producer
from minato_gpu.lanes.progress import Progress
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.streams import Stream, share_seed
from minato_gpu.lanes.unsent import send
from minato_gpu.lanes.wire import Channel
from minato_gpu.memory.board import (
    CHUNK,
    FETCHING,
    HAND,
    JOINING,
    LIMIT,
    NO_LIMIT,
    REPORTING,
    RUN,
    SAVES,
    SINCE_NS,
    STAGE,
    STARTED,
    Board,
)
from minato_gpu.samples import no_end
from minato_gpu.threads import OwnThread, await_event

_SINCE_S = 50e-6  # the board says that precisely how long a sample has been running


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
        self._producer = Producer(number, job, store, self._show_stage)
        self._producer.handing_over = partial(board.handing_over, number)
        self._placement = Placement(job, store, self._producer.who)
        self._stream: Stream | None = None
        self._stream_of: tuple[int, int] | None = None
        self._poke = poke  # an event descriptor
        self._lock = threading.Lock()  # over the progress below, which the watcher reports from
        self._open: tuple[Progress, bool] | None = None  # a chunk that may be reported at any time; unseeded?
        self._watcher: threading.Thread | None = None
        self._ended = False

    def run(self) -> None:
        """Serve until the engine ends the channel."""
        delay = RunQueueDelay()
        try:
            self._serve(delay)
        finally:  # a thread may be ended by what it is at, and must not leave another behind
            delay.close()
            self._end()

    def _serve(self, delay: RunQueueDelay) -> None:
        kinds = {"run": self._prepare, "inspect": self._inspect, "collate": self._collate, "next": self._next}
        words, row = self._words, self._row
        while (task := self._channel.receive()) is not None:
            progress = Progress(task, delay)
            words[row + HAND] = -1
            words[row + LIMIT] = NO_LIMIT
            words[row + STARTED] = words[row + STAGE] = 0
            words[row + SINCE_NS] = int(1e9 * progress.begin)
            words[row + RUN] = task.run
            words[row + CHUNK] = task.chunk
            status = kinds[task.kind](task, progress)
            self._report(progress, final=True, status=status)
            del task, progress

    # --- kinds of task -------------------------------------------------------------------------------------

    def _prepare(self, task: Task, progress: Progress) -> str:
        """Samples of a map-style data set, with or without a pipeline."""
        if self._job.cuts:
            progress.parts = []
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
            self._watcher = OwnThread(target=self._watch, name="minato-watcher", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        """Answer pokes. A chunk whose samples may have drawn random numbers unseeded stays unreported."""
        while not self._ended:
            await_event(self._poke)
            with self._lock:
                if self._open is not None:
                    progress, unseeded = self._open
                    ready = len(progress.times)  # before the check: what is added after it may have drawn
                    if ready and not (unseeded and self._moved()):
                        self._send(progress.task, progress.report(self._number, final=False, ready=ready))

    def _end(self) -> None:
        self._ended = True
        if self._watcher is not None:
            os.eventfd_write(self._poke, 1)
            self._watcher.join()

    def _inspect(self, task: Task, progress: Progress) -> str:
        for piece in task.pieces:
            for at in range(len(piece.keys)):
                self._show(progress.done + 1)
                try:
                    item: Any = self._producer.inspect(task, piece, at)
                except Exception as error:
                    item = self._producer.failure(task, piece, at, error)
                progress.add(item)
        return ""

    def _collate(self, task: Task, progress: Progress) -> str:
        """Join samples that other workers prepared, or that could not be sent between processes."""
        piece = task.pieces[0]
        lying = self._lying(task)
        if lying is not None:
            self._show(0, JOINING)
            progress.add(self._placement.joined(lying, task.epoch, piece))
            return ""
        progress.repeated = 0 if task.items is None else len(piece.keys)
        produce, samples, bad = self._producer.of(task, piece, False), dict[int, Any](), list[Failure]()
        for at in range(len(piece.keys)):
            self._show(at + 1)
            try:
                samples[at] = produce(at)
            except Exception as error:
                bad.append(self._producer.failure(task, piece, at, error))
        self._show(len(piece.keys), JOINING)
        progress.add(self._placement.alone(task, samples, bad))
        return ""

    def _lying(self, task: Task) -> list[Any] | None:
        """The samples that others laid down; None where there are none, or one cannot be loaded: as with those that
        cannot be sent, the ``collate_fn`` may make something of it where it was prepared."""
        if task.items is None:
            return None
        try:
            return [self._store.get(item) for item in task.items]
        except Exception:
            return None

    def _next(self, task: Task, progress: Progress) -> str:
        """The next batch of this worker's own stream, as PyTorch's worker would fetch it."""
        status, failed = "", False
        item: Any = None
        try:
            no_end(self._producer.check_started, "worker_init_fn")()
            if self._stream_of != (task.run, task.epoch):
                self._stream_of = (task.run, task.epoch)
                self._stream = None
                if task.shared_seed is not None:
                    share_seed(self._job.dataset, task.shared_seed)
                opened = no_end(Stream.open, "iter() of the data set")
                self._stream = opened(self._job, task.start, task.items, self._goes_on)
            if self._stream is None:
                raise StopIteration
            item = self._store.put(self._stream.fetch(task.items), collated=True)
        except StopIteration:
            if self._stream is not None:
                progress.told = self._stream.told()
            status, self._stream = "exhausted", None
        except Exception as error:
            failed = True  # nobody knows how far into the batch
            item = self._placement.batch_failure(error, "iterating the data set", task.epoch)
        if self._stream is not None:  # also after a batch that failed: its samples are gone from the stream
            progress.told = self._stream.told(exactly=bool(self._words[SAVES]) or failed)
        progress.add(item)
        return status

    def _goes_on(self) -> bool:
        """One more sample of a stream that is read again: whether the parent still wants it."""
        self._words[self._row + SINCE_NS] = int(1e9 * perf_counter())
        return bool(self._words[self._row + LIMIT] > 0)

    def _show_stage(self, number: int) -> None:
        self._words[self._row + STAGE] = number + 1

    def _show(self, started: int, stage: int = 0) -> None:
        """Tell the board what begins now."""
        words, row = self._words, self._row
        words[row + STAGE] = stage
        words[row + STARTED] = started
        words[row + SINCE_NS] = int(1e9 * perf_counter())

    # --- samples -------------------------------------------------------------------------------------------

    def _attempt(self, task: Task, progress: Progress, unseeded: bool) -> bool:
        """Prepare what is not reported; False when it must be done again because unseeded samples drew."""
        skip, before = progress.reported, 0
        for piece in task.pieces:
            size = len(piece.keys)
            if skip >= size:
                skip, before = skip - size, before + size
                continue
            whole = piece.whole and piece.slab < 0 and (not self._job.cuts or isinstance(piece.keys[0], NoSample))
            samples: list[Any] = []
            start = len(progress.items)
            self._open_to_pokes(None if whole or progress.size == 1 else (progress, unseeded))
            if self._producer.fetches_many(task):
                self._show(progress.done + 1, FETCHING)
            produce = self._producer.of(task, piece, unseeded)
            self._words[self._row + STAGE] = 0
            put = _append_to(samples) if whole else self._placement.putter(task, piece, progress)
            if isinstance(piece.keys[0], NoSample):
                produce = put = _nothing
            elif self._job.cuts:
                put = _unless_handed(put)
            while skip < size and self._go_on(progress, piece, skip, produce, put, to_end=whole):
                if not self._publish(progress, unseeded):
                    return False
                skip = progress.done - before
            before, skip = before + size, 0
            if whole:
                self._show(progress.done, JOINING)
                self._placement.join(progress, piece, start, samples)
                self._words[self._row + STAGE] = 0
                if progress.now > progress.report_at and not self._publish(progress, unseeded):
                    return False
        with self._lock:
            self._open = None
        return not (unseeded and self._moved())

    def _go_on(self, progress: Progress, piece: Piece, first: int, produce: Produce, put: Put, *, to_end: bool) -> bool:
        """Prepare samples ``first`` and on of the piece, to its end or where it is revoked; True when stopping before
        that because a report is due. Nothing here is called that need not be: cheap samples come by the hundred."""
        words, started, limit, since = self._words, self._row + STARTED, self._row + LIMIT, self._row + SINCE_NS
        fence, unfence = self._board.barrier.acquire, self._board.barrier.release
        now, done, delayed, shown = progress.now, progress.done, progress.delayed, 0.0
        ready, took, parts = progress.items.append, progress.times.append, progress.parts
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
            if parts is not None:
                parts.append(self._producer.take_part())
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
        words, row = self._words, self._row
        words[row + STAGE] = REPORTING
        if final:
            words[row + CHUNK] = -1
        self._send(progress.task, progress.report(self._number, final=final, status=status))
        words[row + STAGE] = 0

    def _send(self, task: Task, report: Report) -> None:
        send(self._channel, report, task, self._store, self._producer.who)


def _append_to(samples: list[Any]) -> Put:
    return lambda at, value: samples.append(value)


def _unless_handed(put: Put) -> Put:
    return lambda at, value: value if isinstance(value, Handed) else put(at, value)


def _nothing(*_: Any) -> None:
    """The sample of an empty batch."""
