"""The lane of one agent, a process of another machine that runs workers for this loader.

Commands are sent to it; what the connection (agent_connection.py) receives comes back as messages of the lane's
contract.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from minato_gpu.lanes.base import Task
from minato_gpu.lanes.contract import Exit, KeptSamples, Lane, Message, Number, Opened, Progress, Recalled
from minato_gpu.lanes.far.agent_connection import AgentConnection, TaskEnded
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
        self._news: deque[Message | TaskEnded] = deque()  # from the connection's thread
        self._lock = threading.Lock()  # over the next two, which belong together
        self._is_signalled = False
        self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._connection = AgentConnection(find, shipment, links, self._tell)

    # --- commands ------------------------------------------------------------------------------------------

    def send(self, task: Task, worker: int = 0) -> None:
        """Sends a task; if the agent is not connected yet, later. If it is lost, the task is reported as ended, with no
        sample."""
        self.leases.add(task)
        self._connection.send(task)

    def recall(self) -> None:
        """Takes back the tasks that have not begun."""
        self._connection.recall()

    def revoke(self, run: int, chunk: int, keep: int) -> None:
        """Asks the agent to start no sample of the task from ``keep`` on."""
        if (run, chunk) in self.leases:
            self._connection.ask("revoke", run, chunk, keep)

    def look(self) -> None:
        """Asks the agent what is finished and what its workers do.

        If it is not connected, or has no task, this reports that itself.
        """
        if not self._connection.ask("look"):
            self._tell(Progress(()))

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Has the agent start another worker. ``blocks`` is ignored: the dead worker's results are stored here."""
        self._connection.ask("replace", worker)

    def kill(self, worker: int, hung: str) -> None:
        """Has the agent end a worker that has hung."""
        self._connection.ask("kill", worker, hung)

    # --- messages ------------------------------------------------------------------------------------------

    def fds(self) -> list[int]:
        """Returns the descriptor that messages make readable."""
        return [self._signal]

    def sleep(self, *, every_task: bool) -> None:
        """Called before the receiver waits: sets which tasks wake it as they end.

        These are all of them, or only those after which workers have little left to do.
        """
        self._connection.ring_from = 0 if every_task else self.leases.low(self.slots)

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        """Returns, in this order: how many samples of revoked tasks the agent will still prepare, reports of finished
        samples, all other messages.

        ``only``: if there is no message, report these tasks alone.
        """
        if self._is_signalled:
            with self._lock:
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
                self.slots = self._connection.workers
        return [*first, *reports, *last]

    def _tell(self, message: Message | TaskEnded) -> None:
        """Passes a message on, and wakes the thread that waits for one."""
        self._news.append(message)
        with self._lock:
            if not self._is_signalled:
                os.eventfd_write(self._signal, 1)
                self._is_signalled = True
        self._links.bell.ring()

    # --- descriptions, and the end -------------------------------------------------------------------------

    def who(self, worker: int) -> str:
        """Names a worker by its number and its agent."""
        return f"worker {worker} of {self.name}"

    def stack_of_hung(self, worker: int) -> str:
        """Returns the stack of a worker, which the agent is asked for; "" if there is no answer within 15 s."""
        return self._describe("stack_of_hung", worker)

    def stacks_at_work(self) -> str:
        """Returns the stacks of workers that are at work; "" if the agent does not answer within 15 s."""
        return self._describe("stacks_at_work")

    def _describe(self, *what: Any) -> str:
        answers = self._connection.descriptions
        while not answers.empty():  # of an earlier question, or of a connection that was lost
            answers.get()
        self._connection.ask("describe", *what)
        with suppress(queue.Empty):
            return answers.get(timeout=_DESCRIBE_S) if self._connection.wire is not None else ""
        return ""

    def stats(self) -> Mapping[str, bool | int | float]:
        """Returns whether the agent is connected, how often it was lost, and the bytes that it has sent."""
        connection, wire = self._connection, self._connection.wire
        received = connection.received_before + (0 if wire is None else wire.received)
        return {"connected": wire is not None, "lost": connection.times_lost, "received_bytes": received}

    def close(self, timeout: float) -> bool:
        """Disconnects; the agent's workers end. Returns True once nothing more is received."""
        self._connection.close()
        if self._signal >= 0:
            os.close(self._signal)
            self._signal = -1
        return True
