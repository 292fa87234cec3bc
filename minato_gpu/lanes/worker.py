"""A CPU worker: takes tasks, prepares samples, puts each where it belongs, marks it as finished.

The same code runs in a process and in a thread. One sample's failure is that sample's alone. A worker shows on the
board which sample it is at, so that a slow one is noticed while it runs and what waits behind it can be given to
others. All that it reports are marks (see memory/completions.py): of costly samples at once, of cheap ones together,
and of those of a batch that waits for all of them together as well, every tenth of a second and at its end: marking
takes some 200 µs where a sample has emptied the processor's caches. What is more than a row or one block of memory is
a ``TicketOutcome`` beside the mark. A batch that is joined here is stored at its first sample's mark.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import partial
from time import perf_counter

from minato_gpu.lanes.base import Failure, Handed, Item, NoSample, Piece, Stored, Task, TicketOutcome, Yielded
from minato_gpu.lanes.cpu_time import RunQueueDelay
from minato_gpu.lanes.field_keeper import FieldKeeper
from minato_gpu.lanes.leases import store_outcome, store_reads
from minato_gpu.lanes.placement import Placement, Put
from minato_gpu.lanes.produce import Job, Produce, Producer
from minato_gpu.lanes.progress import TELL_ROWS_S, LeaseProgress
from minato_gpu.lanes.sharing import Sharing
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.streams import Stream, StreamState, share_seed
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.completions import IN_ROW, RETURNED, Location
from minato_gpu.memory.status_board import (
    ACTIVE,
    BYTES,
    CHUNK,
    DIRECT,
    DIRECT_NS,
    FETCHING,
    HAND,
    JOINING,
    LIMIT,
    NO_LIMIT,
    REPORTING,
    RING_FROM,
    RUN,
    SINCE_NS,
    STAGE,
    STARTED,
    STOPPED,
    base_of,
)
from minato_gpu.samples import Value, no_end
from minato_gpu.sources.reading import AT_HAND

_END = Yielded(None, None)
_WHOLE = StreamState(None)  # of a stream without a state of its own, after a batch that is whole
_SINCE_S = 50e-6  # the board says that precisely how long a sample has been running


class Worker:
    """Prepares samples and batches: ``run`` takes tasks until ``receive`` returns None."""

    def __init__(
        self, number: int, job: Job, receive: Callable[[], Task | None], store: Store, links: WorkerChannels
    ) -> None:
        self._number = number
        self._job = job
        self._receive = receive
        self._store = store
        self._links = links
        self._reads_ahead = links.fetched is not None
        self._board = board = links.board
        self._bell = links.bell
        self._words = board.words
        self._row = board.row(number)
        self._producer = Producer(number, job, store, self._show_stage)
        self._producer.handing_over = partial(board.handing_over, number)
        if job.pipeline is not None and links.fields is not None:
            self._producer.keeping = FieldKeeper(job.pipeline, links.fields, self._producer.seeder)
        if links.prepared is not None:
            self._producer.sharing = Sharing(*links.prepared)
        self._placement = Placement(job, store, self._producer.who, self._producer.seeder)
        self._stream: Stream | None = None  # stream of an iterable data set, opened anew with each run and epoch
        self._stream_of: tuple[int, int] | None = None
        self._base = NO_LIMIT  # the task's base of LIMIT, see ``status_board.base_of``
        self._overdrawn = (0, -1, 0)  # run and chunk, and the bytes that it came to beyond its credit

    def run(self) -> None:
        """Serves until there will be no other task."""
        AT_HAND.arena, AT_HAND.keeps_fields = self._links.fetched, self._producer.keeping is not None
        AT_HAND.shares = self._producer.sharing is not None
        delay = RunQueueDelay()
        try:
            self._serve(delay)
        finally:
            delay.close()

    def _serve(self, delay: RunQueueDelay) -> None:
        kinds = {"run": self._prepare, "inspect": self._inspect, "collate": self._prepare, "next": self._next}
        words, row = self._words, self._row
        while (task := self._next_task()) is not None:
            progress = LeaseProgress(task, delay)
            words[row + HAND] = -1
            self._base = base_of(task.run, task.chunk)
            words[row + STARTED] = words[row + STAGE] = words[row + BYTES] = 0
            words[row + SINCE_NS] = int(1e9 * progress.begin)
            words[row + RUN] = task.run
            words[row + CHUNK] = task.chunk
            kinds[task.kind](task, progress)
            if self._reads_ahead and AT_HAND.direct:
                self._count_reads()
            self._end(progress)
            del task, progress

    def _next_task(self) -> Task | None:
        """Waits for a task; before that, while this worker is to rest."""
        while self._number >= self._words[ACTIVE]:
            os.eventfd_read(self._links.rests[self._number])
        return self._receive()

    def _count_reads(self) -> None:
        """Counts what has been read from storage itself."""
        self._words[self._row + DIRECT] += AT_HAND.direct
        self._words[self._row + DIRECT_NS] += int(1e9 * AT_HAND.direct_s)
        AT_HAND.direct, AT_HAND.direct_s = 0, 0.0

    # --- kinds of task -------------------------------------------------------------------------------------

    def _prepare(self, task: Task, progress: LeaseProgress) -> None:
        """Prepares samples of a map-style data set, with or without a pipeline, and batches of them."""
        if self._job.cuts and task.kind == "run":
            progress.parts = []
        items = not (self._job.auto_collation or task.pieces[0].joins)
        if items:  # what is delivered by itself does not wait for one that takes long
            progress.tell_each()
        elif task.singly:
            progress.tell_every(0.0)
        elif self._job.in_order and not (task.credit or self._job.cuts) and all(p.slab >= 0 for p in task.pieces):
            progress.tell_every(TELL_ROWS_S)
        if task.kind == "run" and not (items and self._placement.own_collate):  # which draws between samples
            progress.unseeded = self._producer.begin_unseeded(task, progress.size)
        if task.credit:
            progress.nbytes = self._owed(task)
        if not 0 < task.credit <= progress.nbytes and not self._attempt(task, progress):
            for item in progress.rewind():
                self._store.discard(item)
            progress.unseeded = False
            self._attempt(task, progress)
        if task.credit:
            self._overdrawn = task.run, task.chunk, progress.nbytes - task.credit
            if progress.nbytes >= task.credit and progress.done < progress.size:
                self._return_rest(progress)

    def _return_rest(self, progress: LeaseProgress) -> None:
        """Returns what is not begun, as the credit is used up, unless it was taken back before (see ``_go_on``)."""
        self._show(progress.done + 1)
        self._board.fence()
        if not self._base <= self._words[self._row + LIMIT] <= self._base + progress.done:
            progress.returned = True
            piece, at = progress.task.find(progress.done)
            self._bell.publish(piece.marks + at, [0.0], progress.now, 0.0, self._number, [(RETURNED, 0, 0)])

    def _owed(self, task: Task) -> int:
        """Returns the bytes that this worker has prepared beyond its credit, and that nobody knew of at the task's
        dispatch.

        So however many tasks wait for it, it is ahead of its credit by one sample at most (P4).
        """
        run, chunk, nbytes = self._overdrawn
        known = task.ended is None or task.ended.get(self._number, -1) >= chunk
        return 0 if run != task.run or known else max(nbytes, 0)

    def _inspect(self, task: Task, progress: LeaseProgress) -> None:
        for piece in task.pieces:
            produce = self._producer.of(task, piece, False)
            progress.shift = piece.marks - progress.done
            for at in range(len(piece.keys)):
                self._show(progress.done + 1)
                try:
                    item: Item = produce(at)
                except Exception as error:
                    item = self._producer.failure(task, piece, at, error)
                progress.add(item)
            self._mark(progress)

    def _next(self, task: Task, progress: LeaseProgress) -> None:
        """Reads the next batches of the worker's own stream."""
        piece = task.pieces[0]
        progress.shift = piece.marks
        progress.tell_each()
        self._go_on(progress, piece, 0, lambda at: self._fetch(task), lambda at, item: item, to_end=False)

    def _fetch(self, task: Task) -> Item:
        """Returns the next batch of the worker's own stream, as PyTorch's worker would fetch it, or its failure.

        With the stream's state, where there is one to report; at the stream's end a ``Yielded`` without a batch.
        """
        item: Stored | Failure | None = None
        failed = False  # so that nobody knows how far into the batch
        try:
            no_end(self._producer.check_started, "worker_init_fn")()
            if self._stream_of != (task.run, task.epoch):
                self._open(task)
            if self._stream is None:
                return _END
            item = self._store.put(self._stream.fetch(), collated=True)
        except StopIteration:
            stream, self._stream = self._stream, None
            return Yielded(None, stream and stream.told())
        except Exception as error:
            failed = True
            item = self._placement.batch_failure(error, "iterating the data set", task.epoch)
        if self._stream is None:
            return item
        # also after a batch that failed: its samples are gone from the stream, and no item tells how many
        state = self._stream.told()
        whole = not failed and state == _WHOLE._replace(size=self._job.batch_size)
        return item if whole else Yielded(item, state)

    def _open(self, task: Task) -> None:
        self._stream_of, self._stream = (task.run, task.epoch), None
        if task.shared_seed is not None:
            share_seed(self._job.dataset, task.shared_seed)
        opened = no_end(Stream, "iter() of the data set")
        self._stream = opened(self._job, task.start, self._goes_on)

    def _goes_on(self) -> bool:
        """Called for each replayed sample of a stream; False once the parent has cancelled."""
        self._words[self._row + SINCE_NS] = int(1e9 * perf_counter())
        return bool(self._words[self._row + LIMIT] != self._base)

    def _show_stage(self, number: int) -> None:
        self._words[self._row + STAGE] = number + 1

    def _show(self, started: int, stage: int = 0) -> None:
        """Shows on the board what begins now."""
        words, row = self._words, self._row
        words[row + STAGE] = stage
        words[row + STARTED] = started
        words[row + SINCE_NS] = int(1e9 * perf_counter())

    # --- samples -------------------------------------------------------------------------------------------

    def _attempt(self, task: Task, progress: LeaseProgress) -> bool:
        """Prepares what is not done; False if it must be done again because unseeded samples drew."""
        words, stage, end = self._words, self._row + STAGE, 0
        for piece in task.pieces:
            begin, end = end, end + len(piece.keys)
            if progress.done >= end:
                continue
            joins, fetches_many = piece.joins, self._producer.fetches_many(task)
            if progress.unseeded:  # also after a batch has been joined
                self._producer.begin_unseeded(task, progress.size)
            samples: list[Value] = []
            progress.shift, progress.share = piece.marks - begin, 0.0
            if fetches_many:
                self._show(progress.done + 1, FETCHING)
            produce = self._producer.of(task, piece, progress.unseeded)
            if fetches_many:
                progress.fetched(end - progress.done)
            words[stage] = 0
            if task.kind == "collate":
                produce = self._where_missing(piece, produce, progress)
            put = _append_to(samples) if joins else self._placement.putter(task, piece, progress)
            if isinstance(piece.keys[0], NoSample):
                produce = put = _nothing
            elif self._job.cuts:
                put = _unless_handed(put)
            if not self._go_on(progress, piece, progress.done - begin, produce, put, to_end=joins):
                return False
            if joins and not self._join(progress, piece, samples):
                return False
            if progress.done < end or 0 < task.credit <= progress.nbytes:
                break  # the rest was taken back, or is to be returned
        return progress.reported == progress.done or not (progress.unseeded and self._producer.drew())

    def _where_missing(self, piece: Piece, produce: Produce, progress: LeaseProgress) -> Produce:
        """Returns a function that loads the samples of a batch that are stored, and prepares the others.

        One that cannot be loaded is prepared, too: the ``collate_fn`` may make something of it where it is prepared.
        """
        stored, lasting = piece.stored, self._placement.own_collate

        def produced(at: int) -> Value:
            if stored is not None and (reference := stored[at]) is not None:
                try:
                    return self._store.get(reference, lasting=lasting)
                except Exception:
                    stored[at] = None
            progress.prepared += 1
            return produce(at)

        return produced

    def _join(self, progress: LeaseProgress, piece: Piece, samples: list[Value]) -> bool:
        """Joins a batch whose samples are all ready; False as for ``_attempt``."""
        words = self._words
        if progress.unseeded and self._placement.own_collate and self._producer.drew():
            return False  # the batch has seeds of its own: what samples have drawn would be seen no more
        self._show(progress.done, JOINING)
        self._placement.join(progress, piece, samples)
        progress.nbytes += sum(item.nbytes for item in progress.items if item is not None)
        words[self._row + BYTES] = progress.nbytes
        words[self._row + STAGE] = 0
        return self._publish(progress)

    def _go_on(
        self, progress: LeaseProgress, piece: Piece, first: int, produce: Produce, put: Put, *, to_end: bool
    ) -> bool:
        """Prepares samples of the piece from ``first`` on, and publishes those that are due; returns what ``_publish``
        does.

        It ends with the piece, where it is revoked, or with the task's credit. Nothing is called that need not be:
        cheap samples come by the hundred, and what a costly one has swept out of the processor's caches is slow to
        call.
        """
        words, started, limit, since = self._words, self._row + STARTED, self._row + LIMIT, self._row + SINCE_NS
        fence, unfence = self._board.barrier.acquire, self._board.barrier.release
        now, done, delayed, shown, share = progress.now, progress.done, progress.delayed, 0.0, progress.share
        ready, took, parts = progress.items.append, progress.times.append, progress.parts
        credit, nbytes, base = progress.task.credit, self._row + BYTES, self._base
        for at in range(first, len(piece.keys)):
            words[started] = done + 1
            if now > shown:
                words[since] = int(1e9 * now)
                shown = now + _SINCE_S
            fence()
            unfence()
            if base <= words[limit] <= base + done:
                break
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
                last, now = now, perf_counter()
                ready(item)
                progress.now = now
                took(now - last + share)
            done += 1
            progress.done = done
            if credit and item is not None and not to_end:
                progress.nbytes += item.nbytes
                words[nbytes] = progress.nbytes
                if progress.nbytes >= credit:
                    break
            if now > progress.report_at and not to_end:
                if not self._publish(progress):
                    return False
                now = progress.now
        return to_end or not progress.times or self._publish(progress)

    # --- reports -------------------------------------------------------------------------------------------

    def _publish(self, progress: LeaseProgress) -> bool:
        """Marks what is finished so far; False if it must not be reported, as it drew without seeds."""
        if progress.unseeded and self._producer.drew():
            return False
        if progress.times:
            if progress.write_rows is not None:
                progress.write()
            self._mark(progress)
        return True

    def _mark(self, progress: LeaseProgress) -> None:
        """Marks what is finished."""
        items, first, layout = progress.items, progress.reported + progress.shift, progress.layout
        locations: list[Location] | None = None
        if progress.parts is not None or layout is not None or items.count(None) < len(items):
            self._show_stage(REPORTING - 1)
            if progress.task.kind == "inspect" and self._store.handover is not None:
                locations = store_reads(items, self._store)
            if locations is None:
                locations = [
                    IN_ROW if each is None else self._store_outcome(progress, each, first + at)
                    for at, each in enumerate(self._outcomes(progress))
                ]
            self._show_stage(-1)
        self._bell.publish(first, *progress.told(), self._number, locations)
        if layout is not None:
            self._bell.ring()  # the next tasks should know it

    @staticmethod
    def _outcomes(progress: LeaseProgress) -> list[TicketOutcome | None]:
        """Returns what is to be said of each sample that is no plain row; with the first, what was found out of all."""
        parts = progress.parts or [None] * len(progress.items)
        pairs = zip(progress.items, parts, strict=True)
        found = [None if item is None and part is None else TicketOutcome(item, part) for item, part in pairs]
        if progress.layout is not None or progress.prepared:
            first = found[0] or TicketOutcome(None)
            found[0] = first._replace(layout=progress.layout, prepared=progress.prepared)
            progress.layout, progress.prepared = None, 0
        return found

    def _store_outcome(self, progress: LeaseProgress, outcome: TicketOutcome, mark: int) -> Location:
        """Stores an outcome and returns where; if it cannot be sent, that is the outcome."""
        try:
            return store_outcome(outcome, mark, self._store, self._links)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was to be sent, perhaps most of the memory
            failed = self._placement.unsent(progress.task, mark - progress.shift, outcome, error)
        return store_outcome(failed, mark, self._store, self._links)

    def _end(self, progress: LeaseProgress) -> None:
        """Ends the task."""
        words, task = self._words, progress.task
        singly = task.kind in ("run", "next")
        if singly and progress.done < progress.size and not progress.returned:
            words[self._row + STOPPED] = self._base + progress.done
            self._board.fence()
        words[self._row + CHUNK] = -1
        self._board.fence()
        if not singly or task.chunk >= words[RING_FROM] or progress.reported < progress.size:
            self._bell.ring()


def _append_to(samples: list[Value]) -> Put:
    return lambda at, value: samples.append(value)


def _unless_handed(put: Put) -> Put:
    return lambda at, value: value if isinstance(value, Handed) else put(at, value)


def _nothing(*_: object) -> None:
    """Stands for the sample of an empty batch."""
