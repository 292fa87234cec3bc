"""The lane of one agent, in the loader's process: commands go to the agent, and what its node (node.py) has received
comes back as messages of the lane's contract."""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from minato_gpu.lanes.base import Task
from minato_gpu.lanes.contract import Exit, KeptSamples, Lane, Message, Number, Opened, Progress, Recalled
from minato_gpu.lanes.far.node import Node, TaskEnded
from minato_gpu.lanes.far.session import Shipment
from minato_gpu.lanes.leases import Leases
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.scheduling.messages import CPU

_DESCRIBE_S = 15.0  # longest wait for an agent's stacks


class FarLane(Lane):
    """Workers of an agent, whose address ``find`` returns. ``shipment``: sent first on each connection."""

    kind = CPU
    on_host = False
    rings = can_kill = shows_progress = True
    advice = "It was not replaced: on_worker_death is 'raise'."

    def __init__(self, find: Callable[[], str], shipment: Shipment, links: WorkerChannels) -> None:
        self.name, self.slots = shipment.lane, shipment.workers
        self.leases = Leases(links)
        self._links = links
        self._news: deque[Message | TaskEnded] = deque()  # from the node's thread
        self._is_signalled = False
        self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._node = Node(find, shipment, links, self._tell)

    # --- commands ------------------------------------------------------------------------------------------

    def send(self, task: Task, worker: int = 0) -> None:
        """Sends a task. From a lost node it comes back at once."""
        self.leases.add(task)
        self._node.send(task)

    def recall(self) -> None:
        """Takes back the tasks that have not begun."""
        self._node.recall()

    def revoke(self, run: int, chunk: int, keep: int) -> None:
        """Asks the agent to start no sample of the task from ``keep`` on."""
        if (run, chunk) in self.leases:
            self._node.ask("revoke", run, chunk, keep)

    def look(self) -> None:
        """Asks the agent what is finished and what its workers are at; answers itself if no task is there."""
        if not self._node.ask("look"):
            self._tell(Progress(()))

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Has the agent start another worker; what the dead one had finished is stored here."""
        self._node.ask("replace", worker)

    def kill(self, worker: int, hung: str) -> None:
        """Has the agent end a worker that has hung."""
        self._node.ask("kill", worker, hung)

    # --- messages ------------------------------------------------------------------------------------------

    def fds(self) -> list[int]:
        """Returns the descriptor that messages make readable."""
        return [self._signal]

    def sleep(self, *, every_task: bool) -> None:
        """Notes which tasks' ends wake the receiver that is about to wait: all, or those at which work runs low."""
        self._node.ring_from = 0 if every_task else self.leases.low(self.slots)

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        """Returns what the node has said: how many samples are kept, reports of those that are marked, then the rest.

        ``only``: where there is nothing else, reports of these tasks are enough.
        """
        if self._is_signalled:
            with suppress(BlockingIOError):
                os.eventfd_read(self._signal)
            self._is_signalled = False
        if only and not self._news:
            return [report for each in only if (report := self.leases.report(*each)) is not None]
        news = [self._news.popleft() for _ in range(len(self._news))]  # before marks are read
        first, last = list[Message](), list[Message]()
        for each in news:
            if isinstance(each, TaskEnded):
                self.leases.shorten(*each)
            elif isinstance(each, KeptSamples):
                if (each.run, each.chunk) in self.leases:
                    self.leases.shorten((each.run, each.chunk), each.keep)
                    first.append(each)
            else:
                last.append(each)
        unfinished = bool(only) or any(isinstance(each, (Exit, Progress)) for each in last)
        reports = self.leases.reports(unfinished=unfinished)
        for message in last:
            for number in message.tasks if isinstance(message, Recalled) else ():
                self.leases.drop(*number)
            if isinstance(message, Exit):
                self.leases.drop(message.claim.run, message.claim.chunk)
            elif isinstance(message, Opened):
                self.slots = self._node.workers
        return [*first, *reports, *last]

    def _tell(self, message: Message | TaskEnded) -> None:
        """Passes a message on, and wakes whoever waits for one."""
        self._news.append(message)
        if not self._is_signalled:
            self._is_signalled = True
            os.eventfd_write(self._signal, 1)
        self._links.bell.ring()

    # --- descriptions, and the end -------------------------------------------------------------------------

    def who(self, worker: int) -> str:
        """Names a worker by its number and its agent."""
        return f"worker {worker} of {self.name}"

    def stack_of_hung(self, worker: int) -> str:
        """Asks the agent for the stack of a worker."""
        return self._describe("stack_of_hung", worker)

    def stacks_at_work(self) -> str:
        """Asks the agent for the stacks of workers that are at work."""
        return self._describe("stacks_at_work")

    def _describe(self, *what: Any) -> str:
        answers = self._node.descriptions
        while not answers.empty():  # of an earlier question, or of a node that was lost
            answers.get()
        self._node.ask("describe", *what)
        with suppress(queue.Empty):
            return answers.get(timeout=_DESCRIBE_S) if self._node.wire is not None else ""
        return ""

    def stats(self) -> Mapping[str, bool | int | float]:
        """Returns whether the node is there, how often it was lost, and the bytes that it has sent."""
        node, wire = self._node, self._node.wire
        received = node.received_before + (0 if wire is None else wire.received)
        return {"connected": wire is not None, "lost": node.times_lost, "received_bytes": received}

    def close(self, timeout: float) -> bool:
        """Leaves the node, whose workers end; returns once nothing more is received."""
        self._node.close()
        if self._signal >= 0:
            os.close(self._signal)
            self._signal = -1
        return True
