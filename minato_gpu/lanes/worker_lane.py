"""The CPU lane: what worker processes and threads have in common, the board and the marks in shared memory."""

from __future__ import annotations

import dataclasses
import os
import select
from collections.abc import Sequence

from minato_gpu.lanes import stacks
from minato_gpu.lanes.contract import AtWork, Exit, KeptSamples, Lane, Message, Number, Opened, Progress, Recalled
from minato_gpu.lanes.leases import Leases
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import (
    ACTIVE,
    CHUNK,
    LIMIT,
    RING_FROM,
    RUN,
    SINCE_NS,
    STAGE,
    STARTED,
    Claim,
    base_of,
)
from minato_gpu.scheduling.messages import CPU


class WorkerLane(Lane):
    """The common part of process and thread lanes: commands and answers by the board."""

    name = kind = CPU
    can_kill = False
    shows_progress = True
    advice = "It was not replaced: on_worker_death is 'raise', or the data set is iterable."

    def __init__(self, links: WorkerChannels) -> None:
        self.links = links
        self.slots = links.board.words[ACTIVE]
        self.leases = Leases(links)
        self._answers: list[Message] = [Opened(self.slots)]
        self._faults: list[Exit | Opened] = []
        self.pids = [os.getpid()] * links.workers  # process id by worker
        self._looks = False  # somebody wants to know how far it all is
        self._gone: set[int] = set()  # workers that have ended, or are being killed
        # one question tells whether somebody has rung; subclasses add descriptors by which they notice faults
        self._watch = select.epoll()
        self._watch.register(links.consumer_wake, select.EPOLLIN)

    def sleep(self, *, every_task: bool) -> None:
        """Says that whoever receives is about to wait."""
        self.links.board.words[RING_FROM] = 0 if every_task else self.leases.low(self.slots)

    def resize(self, slots: int) -> None:
        """Has so many workers take tasks; answered by ``Opened``."""
        more, self.slots = slots - self.slots, slots
        self.links.activate(slots)
        self._answer(Opened(more))

    # --- work ---

    def recall(self) -> None:
        """Takes back tasks that no worker has taken; answered by ``Recalled``."""
        self.links.board.words[RING_FROM] = 0
        tasks = self._taken_back()
        for task in tasks:
            self.leases.drop(*task)
        if tasks:
            self._answer(Recalled(tuple(tasks)))

    def _taken_back(self) -> list[Number]:
        """Returns tasks that no worker has taken, and none will."""
        raise NotImplementedError

    def _begin_no_more(self) -> None:
        """Ends every worker after its current sample; those that rest come to leave, too."""
        self._taken_back()
        self.links.activate(self.links.workers)
        for worker in range(self.links.workers):
            row, words = self.links.board.row(worker), self.links.board.words
            words[row + LIMIT] = base_of(words[row + RUN], words[row + CHUNK])

    def revoke(self, run: int, chunk: int, keep: int) -> None:
        """Stops the worker at the task before sample ``keep``, by its row of the board."""
        worker = self.links.board.find(run, chunk)
        if worker is None:
            return
        self.leases.settle(worker)
        kept = self.links.board.revoke(worker, run, chunk, keep)
        if kept is not None and (run, chunk) in self.leases:  # else it is finished, and its worker not quite through
            self.leases.revoked(run, chunk, kept, worker)
            self._answer(KeptSamples(run, chunk, kept, self.links.board.nbytes(worker)))

    def hand_over(self, run: int, chunk: int, splits: Sequence[int]) -> None:
        """Asks the worker at the task, by the board, to hand its current sample over."""
        self.links.board.hand_over(run, chunk, splits)

    def look(self) -> None:
        """Looks at marks and board; answered by reports, then ``Progress``."""
        self._looks = True

    def _answer(self, message: Message) -> None:
        self._answers.append(message)
        os.eventfd_write(self.links.consumer_wake, 1)

    # --- what it tells ---

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        """Returns the messages of marks, of the board and of workers that ended."""
        if only:
            return [report for each in only if (report := self.leases.report(*each)) is not None]
        self._hear()  # before marks are read: those of the dead are all there by then
        reports = self.leases.reports(unfinished=self._looks or bool(self._faults))
        if not (self._answers or self._faults or self._looks):
            return reports
        out: list[Message] = [*self._answers, *reports]
        if self._looks:
            out.append(Progress(self.at_work()))
        out += map(self._buried, self._faults)
        self._answers, self._faults, self._looks = [], [], False
        return out

    def _hear(self) -> None:
        """Silences the bell, and puts workers that have ended or arrived into ``_faults``."""
        for fd, _ in () if self._watch.closed else self._watch.poll(0, 4):
            if fd == self.links.consumer_wake:
                os.eventfd_read(fd)
            else:
                self._faults += self._found()

    def _found(self) -> Sequence[Exit | Opened]:
        """Returns workers that have ended since the last call, or have arrived."""
        raise NotImplementedError

    def _buried(self, fault: Exit | Opened) -> Exit | Opened:
        """Returns the fault with what the worker had taken last; all that it reported is taken in."""
        if isinstance(fault, Opened) or fault.start_error:
            return fault
        claim = self.links.board.claim(fault.number)
        self.leases.drop(claim.run, claim.chunk)
        self.leases.bury(fault.number)
        self._gone.add(fault.number)
        return dataclasses.replace(fault, claim=claim)

    def at_work(self) -> tuple[AtWork, ...]:
        """Returns what the workers that are at a task are at."""
        found, board, words = [], self.links.board, self.links.board.words
        for worker in range(self.links.workers):
            row = board.row(worker)
            if words[row + CHUNK] >= 0 and worker not in self._gone:
                claim = Claim(words[row + RUN], words[row + CHUNK], words[row + STARTED], words[row + STAGE])
                found.append(AtWork(worker, claim, words[row + SINCE_NS] / 1e9))
        return tuple(found)

    # --- faults ---

    def who(self, worker: int) -> str:
        """Returns a worker in words."""
        return f"worker {worker} (pid {self.pids[worker]})"

    def stacks_at_work(self) -> str:
        """Returns the stacks of workers at work; of all if none is: they may never have come to take a task."""
        busy = [each.worker for each in self.at_work()]
        return stacks.told(self._stacks_of(busy or range(self.links.workers)))

    def stack_of_hung(self, worker: int) -> str:
        """Returns the stack of a worker that is taken to hang."""
        return stacks.told(self._stacks_of([worker]))

    def _stacks_of(self, workers: Sequence[int]) -> dict[int, str]:
        """Returns the Python stacks of these workers; empty where there is none."""
        raise NotImplementedError
