"""Completion marks: how workers report finished tickets, by one status byte for each ticket and a record beside it.

Every place of the sampler's order has a block of *marks*, one for each of its tickets; so has a job, for its batch. A
ticket has one writer at a time, the worker whose lease it is in. That worker writes, in this order: the sample into its
row; the record (when it was ready, what it took, who made it, and where it is stored if not in its row); a fence; the
byte; a fence. Then it looks whether somebody waits for this batch, counts its bytes, and rings if they are all there.
The parent writes what it waits for, a fence, then counts them too: of the two at least one sees all bytes, so both may
ring but never neither.

Why a worker may be killed at any moment: a byte that is set says that all that was written before it is whole, because
both sides pass a fence between the two. One that is not set says nothing: the ticket is prepared again, by another
worker and into the same row, once the death is confirmed. Of tickets that are finished together the last byte is set
first: where the first is set all are, and what a killed worker has set behind one that is open is cleared before. So a
batch that was joined by the worker that prepared it is there as a whole, or not at all. No lock is held over any of
this, and no counter is shared by writers.

The parent sets a byte to another value when it takes the ticket in, and clears it when the place gets its block.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minato_gpu.memory.status_board import (
    ATTENTION,
    AWAITED_BEGIN,
    AWAITED_END,
    AWAITED_NEED,
    CONSUMER,
    PUMP,
    WorkerStatusBoard,
)
from minato_gpu.samples import Value

_IN_ROW, _ELSEWHERE, _TAKEN = b"\x01", b"\x02", b"\x03"  # else the ticket is open
_READY = _IN_ROW + _ELSEWHERE
READY = frozenset(_READY)
_RECORD = np.dtype(
    [
        ("end", np.float64),  # when the ticket was finished, on the monotonic clock
        ("offset", np.int64),
        ("nbytes", np.int64),
        ("took", np.float32),  # seconds on a core
        (
            "elapsed",
            np.float32,
        ),  # seconds of all that were reported together, in the last one's record; 0 in the others
        ("worker", np.int32),
        ("kind", np.int32),
    ]
)
_SINGLE = struct.Struct("=dqqffii")
TICKET_BYTES = 1 + _RECORD.itemsize
MOST = 1 << 28  # bytes of address space, where nothing limits that: marks of six million tickets

ROW, BLOB, BATCH, PICKLED, LOCAL, RETURNED, READS, READ = range(8)
"""The outcome of a ticket: a sample in its row; one in a blob of the worker's arena; a batch in such a blob; anything
else, whose ``TicketOutcome`` is pickled in that arena, or, made in this very process, is in ``Completions.local``; or
nothing: the worker returns this ticket and those of its lease that follow. Of host reads that are reported together
the first is ``READS``, which has those of all of them; each other is ``READ``."""

Location = tuple[int, int, int]
"""The outcome of a ticket, and its place in the worker's arena: offset and bytes."""

IN_ROW: Location = ROW, 0, 0

End = float | Sequence[float]
"""The times at which tickets that are reported together were finished: one for all, or one for each."""


class Taken(NamedTuple):
    """Finished tickets that were taken in together."""

    took: list[float]  # seconds that each took
    elapsed: float  # seconds of all together
    ends: list[float]  # when each was finished
    worker: int
    locations: list[Location] | None  # what each is, and where it is stored; None if all are in their rows


class Completions:
    """The marks of ``capacity`` tickets, shared by all processes of a loader. The memory is sparse, as an arena's."""

    def __init__(self, capacity: int, memory: memoryview) -> None:
        """``memory``: ``capacity * TICKET_BYTES`` bytes, which the caller owns."""
        self.capacity = capacity
        self._bytes = memory
        records: NDArray[Value] = np.frombuffer(memory, _RECORD, capacity)
        self._columns = {name: records[name] for name in _RECORD.names or ()}
        self._took, self._elapsed, self._end = (self._columns[name] for name in ("took", "elapsed", "end"))
        self._status = memory[capacity * _RECORD.itemsize :]
        self.status = self._status.toreadonly()  # status by mark; READY where a ticket is finished and not taken
        self.local: dict[int, Any] = {}  # outcomes from this very process (worker threads, other machines), by mark
        self._used = 0  # marks that have been in a block at some time: none is ready beyond
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # free blocks of marks, by size
        self._sizes: dict[int, int] = {}

    # --- parent -------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> int:
        """Returns the first mark of a block of ``count`` cleared ones. Raises MemoryError if there is none."""
        size = 1 << max(count - 1, 0).bit_length()
        if self._free[size]:
            first = self._free[size].pop()
        elif self._used + size <= self.capacity:
            first, self._used = self._used, self._used + size
        else:
            raise MemoryError(f"no more than {self.capacity} samples can be under way")
        self._sizes[first] = size
        self._status[first : first + count] = bytes(count)
        return first

    def give_back(self, first: int) -> None:
        """Frees the block that begins with mark ``first``. Nobody may write to it any more."""
        self._free[self._sizes.pop(first)].append(first)

    def ready(self, begin: int, end: int) -> int:
        """Returns how many of the tickets with marks ``begin`` to ``end`` - 1 are finished and not taken in."""
        marks = bytes(self._status[begin:end])
        return marks.count(_IN_ROW) + marks.count(_ELSEWHERE)

    @property
    def ready_anywhere(self) -> tuple[int, int]:
        """The range of marks (first, end) that have ever been in a block: every ready one is in it, of places and
        jobs."""
        return 0, self._used

    def leading(self, begin: int, end: int) -> int:
        """Returns how many tickets from ``begin`` on are finished and not taken in, without a gap."""
        marks = bytes(self._status[begin:end])
        return len(marks) - len(marks.lstrip(_READY))

    def take(self, begin: int, end: int) -> Taken:
        """Takes in the tickets with marks ``begin`` to ``end`` - 1. All must be finished, by one worker."""
        locations = None
        if _ELSEWHERE in bytes(self._status[begin:end]):
            columns = [self._columns[name][begin:end].tolist() for name in ("kind", "offset", "nbytes")]
            locations = list(zip(*columns, strict=True))
        self._status[begin:end] = _TAKEN * (end - begin)
        elapsed = sum(self._elapsed[begin:end].tolist())
        took, ends = self._took[begin:end].tolist(), self._end[begin:end].tolist()
        return Taken(took, elapsed, ends, int(self._columns["worker"][end - 1]), locations)

    def clear(self, begin: int, end: int) -> None:
        """Opens the tickets with marks ``begin`` to ``end`` - 1 again, to be prepared anew. Nobody may be at them."""
        for mark in range(begin, end) if self.local else ():
            self.local.pop(mark, None)
        self._status[begin:end] = bytes(end - begin)

    # --- worker -------------------------------------------------------------------------------------------

    def record(
        self,
        begin: int,
        took: Sequence[float],
        end: End,
        elapsed: float,
        worker: int,
        locations: Sequence[Location] | None,
    ) -> None:
        """Records tickets from ``begin`` on as finished, one for each number in ``took``; ``set_ready`` must follow.

        ``took``: seconds that each took on a core. ``end``: when they were finished, on the monotonic clock: one time
        for all, or one for each; of a single ticket a float. ``elapsed``: seconds that all took together, waits for a
        core included. ``worker``: who prepared them. ``locations``: where each is stored; None if all are in their
        rows.
        """
        if len(took) == 1:
            kind, offset, nbytes = IN_ROW if locations is None else locations[0]
            _SINGLE.pack_into(
                self._bytes, begin * _RECORD.itemsize, end, offset, nbytes, took[0], elapsed, worker, kind
            )
            return
        stop, columns = begin + len(took), self._columns
        columns["end"][begin:stop] = end
        columns["took"][begin:stop] = took
        columns["elapsed"][begin:stop] = 0.0
        columns["elapsed"][stop - 1] = elapsed
        columns["worker"][begin:stop] = worker
        if locations is None:
            columns["kind"][begin:stop] = ROW
        else:
            for name, values in zip(("kind", "offset", "nbytes"), zip(*locations, strict=True), strict=True):
                columns[name][begin:stop] = values

    def set_ready(self, begin: int, end: int, *, in_rows: bool) -> None:
        """Marks these tickets as finished. They must have been recorded, and a fence passed since.

        The first becomes ready last. It goes byte by byte, because each must be stored once: a copy of four bytes
        stores them twice, and a worker that is stopped in between has reported them to the parent already, which may
        have given the block to other tickets meanwhile.
        """
        status, mark = self._status, (_IN_ROW if in_rows else _ELSEWHERE)[0]
        for at in range(end - 1, begin - 1, -1):
            status[at] = mark

    def close(self) -> None:
        """Releases the views of the shared memory; nothing else may be called afterwards."""
        self.status.release()
        self._status.release()
        self._columns.clear()
        del self._took, self._elapsed, self._end
        self._bytes.release()


class Bell:
    """Wakes the training process: whichever of its threads waits, and only for what that waits for.

    ``pump`` and ``consumer`` are event descriptors, one for each thread.
    """

    def __init__(self, board: WorkerStatusBoard, completions: Completions, pump: int, consumer: int) -> None:
        self._board = board
        self._words = board.words
        self._fence, self._unfence = board.barrier.acquire, board.barrier.release
        self._completions = completions
        self._pump = pump
        self._consumer = consumer

    def ring(self) -> None:
        """Wakes the thread that has asked for attention on the board, the pump or the consumer; nobody if none has."""
        attention = self._words[ATTENTION]
        if attention == PUMP:
            os.eventfd_write(self._pump, 1)
        elif attention == CONSUMER:
            os.eventfd_write(self._consumer, 1)

    def publish(
        self,
        begin: int,
        took: Sequence[float],
        end: End,
        elapsed: float,
        worker: int,
        locations: Sequence[Location] | None,
    ) -> None:
        """Reports tickets from ``begin`` on as finished (see ``Completions.record``).

        Rings if these complete what somebody waits for (``await_tickets``).
        """
        stop, words, completions = begin + len(took), self._words, self._completions
        completions.record(begin, took, end, elapsed, worker, locations)
        self._fence()
        self._unfence()
        completions.set_ready(begin, stop, in_rows=locations is None)
        self._fence()
        self._unfence()
        need = words[AWAITED_NEED]
        if not need or begin >= words[AWAITED_END] or stop <= words[AWAITED_BEGIN]:
            return
        if completions.ready(words[AWAITED_BEGIN], words[AWAITED_END]) >= need:
            self.ring()

    def await_tickets(self, begin: int, end: int, need: int) -> bool:
        """Has workers ring once ``need`` of the tickets with marks ``begin`` to ``end`` - 1 are finished and not taken
        in, in place of those of an earlier call; returns whether so many are now. Called in the parent."""
        words = self._words
        words[AWAITED_NEED] = 0
        words[AWAITED_BEGIN], words[AWAITED_END] = begin, end
        words[AWAITED_NEED] = need
        self._board.fence()
        return self._completions.ready(begin, end) >= need

    def await_nothing(self) -> None:
        """Has workers ring for no ticket. Called in the parent."""
        self._words[AWAITED_NEED] = 0
