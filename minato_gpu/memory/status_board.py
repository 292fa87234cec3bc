"""The board: a page of shared memory on which every worker shows what it is doing, without a message.

One row of 64-bit words per worker. A worker writes CHUNK, STARTED, SINCE_NS; the parent writes LIMIT to take samples
back that have not started. It writes HAND, the number of a chunk whose samples are to be handed over to another lane,
after SPLITS, a mask of the stages before which: a wish, which needs no hand-shake. For LIMIT the hand-shake is
Dekker's: a worker writes STARTED, then reads LIMIT; the parent writes LIMIT, then reads STARTED; a lock operation
between the two (a full fence on the processors that PyTorch supports) makes sure that at least one sees the other. Both
may: then the worker does not begin what its parent takes for begun, or has ended the task before its parent looks. So
it writes where it has STOPPED before it says that it is at no task (CHUNK).

Each worker also has a ring of offsets in its own arena that the parent has freed: written by the parent at TAIL, taken
by the worker at HEAD.

And each has an *inbox*: the kernel puts a task there as it takes it out of the socket, in one system call, so the
parent reads in the inbox of a worker that was killed, at whatever moment, which task it had taken. Its pages are
touched before the first task: the copy must not fault, because a process that is being killed may fail a fault, and
lose the message.

Decision: neither a claim that the worker writes (between taking a task and writing that, it can be killed) nor a lock
(it can be killed holding it).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from time import sleep
from typing import NamedTuple

CHUNK, STARTED, LIMIT, SINCE_NS, HEAD, TAIL, RUN, HAND, STAGE, SPLITS, DIRECT, DIRECT_NS, BYTES, STOPPED, KNOWN = range(
    15
)
"""Words of a row. LIMIT and STOPPED count on from ``base_of`` a task, so that they are of no other. STOPPED: how many
samples were begun of the last task that a limit has ended. DIRECT and DIRECT_NS: how often, and how long, its worker
has read from storage itself, although the loader reads ahead. BYTES: what its task has come to so far, where that has a
credit. KNOWN: process id of the worker that the parent knows of: a replacement begins once it is its own."""
JOINING, FETCHING, REPORTING = -1, -2, -3
"""In STAGE: collating a batch, in __getitems__, storing outcomes; else a pipeline's stage plus 1, or 0."""
INBOX = 25 * 4096  # bytes; a larger task travels otherwise (lanes/worker_channels.py)
_ROW = 16
_RING = 1 << 14
NO_LIMIT = -1
_LOOK_S = 2e-3  # a new worker looks so often whether it is known
_LIMIT_BITS = 22
_BITS = 63  # of a word that is no sign; later stages are never asked for
ATTENTION, AWAITED_BEGIN, AWAITED_END, AWAITED_NEED, RING_FROM, ACTIVE = range(6)
"""Words of the header. ATTENTION: who is to be woken by what is reported; AWAITED_*: how many tickets, of which,
somebody waits for (see ``completions``); RING_FROM: the end of a lease of this number or a later one is worth a
wake-up, because too few are left (0: of any lease). ACTIVE: workers of lower numbers than this take tasks, the others
rest."""
NOBODY, PUMP, CONSUMER = range(3)
"""In ATTENTION."""
_HEADER = 8


def base_of(run: int, chunk: int) -> int:
    """Returns the value of LIMIT that keeps a task from beginning any sample."""
    return (run * 1_000_003 + chunk) % (1 << 40) << _LIMIT_BITS


class Claim(NamedTuple):
    """The task of a worker, or of one that has died, and how far it had begun it."""

    run: int
    chunk: int
    started: int  # samples of the chunk that had been begun
    stage: int  # step that the last of them was at, as the word STAGE says it


class WorkerStatusBoard:
    """The shared words of all workers; the module's docstring says who writes which."""

    def __init__(self, workers: int, memory: memoryview) -> None:
        """``memory``: ``size(workers)`` bytes, which the caller owns."""
        self.workers = workers
        self._inboxes_at = 8 * (_HEADER + workers * (_ROW + _RING))
        self._bytes = memory
        self.words = self._bytes.cast("q")
        self.barrier = threading.Lock()  # taking and releasing it is a full memory barrier
        self._inboxes: dict[int, memoryview] = {}
        self._read_directly = 0, 0.0

    @staticmethod
    def size(workers: int) -> int:
        """Returns the bytes of a board of so many workers."""
        return 8 * (_HEADER + workers * (_ROW + _RING)) + workers * INBOX

    def clear(self) -> None:
        """Makes fresh memory a board on which all workers are active and none has begun."""
        self.words[ACTIVE] = self.workers
        for worker in range(self.workers):
            self.forget(worker)

    def row(self, worker: int) -> int:
        """Returns the index of the first word of the worker's row."""
        return _HEADER + worker * (_ROW + _RING)

    def fence(self) -> None:
        """Issues a full memory barrier."""
        with self.barrier:
            pass

    # --- parent -------------------------------------------------------------------------------------------

    def find(self, run: int, chunk: int) -> int | None:
        """Returns the worker that works on the chunk; None if none has taken it or begun it yet, or it has ended."""
        for worker in range(self.workers):
            row = self.row(worker)
            if self.words[row + CHUNK] == chunk and self.words[row + RUN] == run:
                return worker
        return None

    def all_busy(self) -> bool:
        """Returns whether every worker that is not to rest is at a chunk, and so will look at ATTENTION once more."""
        return all(self.words[self.row(worker) + CHUNK] >= 0 for worker in range(self.words[ACTIVE]))

    def revoke(self, worker: int, run: int, chunk: int, keep: int) -> int | None:
        """Stops the worker before sample ``keep`` of the chunk, or after those that it has begun, if these are more.

        Returns the number of the sample before which it stops at the latest: it may stop before one that it was just
        about to begin. Of a task that has ended, returns what ``stopped`` does: None if no limit ended it.
        """
        row = self.row(worker)
        self.words[row + LIMIT] = base_of(run, chunk) + keep
        self.fence()
        started = self.words[row + STARTED]
        self.fence()
        if self.words[row + CHUNK] != chunk:  # last: what it has started may be its next task's by then
            return self.stopped(worker, run, chunk)
        return max(keep, started)

    def stopped(self, worker: int, run: int, chunk: int) -> int | None:
        """Returns how many samples of this task the worker had begun when a limit ended it.

        None if no limit has ended it, or one has ended a later task.
        """
        self.fence()
        begun = self.words[self.row(worker) + STOPPED] - base_of(run, chunk)
        return begun if 0 <= begun < 1 << _LIMIT_BITS else None

    def nbytes(self, worker: int) -> int:
        """Returns the bytes, beside rows, that results of the worker's task take so far; complete only where the
        task has a credit."""
        return int(self.words[self.row(worker) + BYTES])

    def hand_over(self, run: int, chunk: int, splits: Iterable[int]) -> None:
        """Asks the worker at the chunk, if any, to hand its current sample over before the next of these stages."""
        worker = self.find(run, chunk)
        if worker is not None:
            self.words[self.row(worker) + SPLITS] = sum(1 << split for split in set(splits) if split < _BITS)
            self.fence()
            self.words[self.row(worker) + HAND] = chunk

    def handing_over(self, worker: int, split: int) -> bool:
        """Returns whether this worker is asked to hand its current sample over before stage ``split``."""
        row, words = self.row(worker), self.words
        return words[row + HAND] == words[row + CHUNK] and split < _BITS and bool(words[row + SPLITS] >> split & 1)

    def claim(self, worker: int) -> Claim:
        """Returns the last task that a worker had taken before it ended, finished or not; run and chunk -1: none.

        Of a task that it had only taken, or had finished, ``started`` and ``stage`` are 0.
        """
        row, inbox = self.row(worker), self._inbox_word(worker)
        run, chunk = self.words[inbox], self.words[inbox + 1]
        if (self.words[row + RUN], self.words[row + CHUNK]) != (run, chunk):
            return Claim(run, chunk, 0, 0)
        return Claim(run, chunk, self.words[row + STARTED], self.words[row + STAGE])

    def forget(self, worker: int) -> None:
        """Clears the row of a worker that has ended, or has not begun."""
        row, inbox = self.row(worker), self._inbox_word(worker)
        self.words[row + CHUNK] = self.words[row + HAND] = self.words[inbox] = self.words[inbox + 1] = -1
        self.words[row + LIMIT] = self.words[row + STOPPED] = NO_LIMIT
        self.words[row + STARTED] = self.words[row + STAGE] = self.words[row + KNOWN] = 0
        self.words[row + HEAD] = self.words[row + TAIL]

    def _inbox_word(self, worker: int) -> int:
        return (self._inboxes_at + worker * INBOX) // 8

    def give_back(self, worker: int, offset: int) -> bool:
        """Tells the worker that a block of its arena is free; False when the ring is full (try again later)."""
        row = self.row(worker)
        tail = self.words[row + TAIL]
        if tail - self.words[row + HEAD] >= _RING:
            return False
        self.words[row + _ROW + tail % _RING] = offset
        self.words[row + TAIL] = tail + 1
        return True

    def read_directly(self) -> tuple[int, float]:
        """Returns how often workers have read from storage themselves, and the seconds that it took.

        Once closed, what it returned last.
        """
        with suppress(ValueError):  # it is closed, or another thread is closing it
            rows = [self.row(worker) for worker in range(self.workers)]
            nanoseconds = sum(self.words[row + DIRECT_NS] for row in rows)
            self._read_directly = sum(self.words[row + DIRECT] for row in rows), nanoseconds / 1e9
        return self._read_directly

    # --- worker -------------------------------------------------------------------------------------------

    def inbox(self, worker: int) -> memoryview:
        """Returns the memory that this worker receives its tasks into, touched page by page."""
        if worker not in self._inboxes:
            begin = self._inboxes_at + worker * INBOX
            self._inboxes[worker] = inbox = self._bytes[begin : begin + INBOX]
            for at in range(0, INBOX, 512):
                inbox[at] = inbox[at]
        return self._inboxes[worker]

    def await_parent(self, worker: int) -> None:
        """Waits until the parent knows of this process: a task taken by an unknown one would be lost with it."""
        known = self.row(worker) + KNOWN
        while self.words[known] != os.getpid():
            sleep(_LOOK_S)

    def returned(self, worker: int) -> list[int]:
        """Returns the offsets freed by the parent since the last call."""
        row = self.row(worker)
        head, tail = self.words[row + HEAD], self.words[row + TAIL]
        if head == tail:
            return []
        ring = row + _ROW
        offsets = [self.words[ring + i % _RING] for i in range(head, tail)]
        self.words[row + HEAD] = tail
        return offsets

    def close(self) -> None:
        """Releases its views. Idempotent."""
        for view in (self.words, *self._inboxes.values(), self._bytes):
            view.release()
