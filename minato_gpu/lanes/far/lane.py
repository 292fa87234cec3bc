"""The lane of one agent, a process of another machine that runs workers for this loader.

Commands are sent to it. A thread of the lane connects, and receives samples (samples.py) and messages, which come back
as those of the lane's contract.

An agent that sends nothing for a second (a minute, while its workers start), or whose connection breaks, is lost: its
tasks end here, and its slots are gone. Others prepare those samples with the same draws; no sample is blamed. An agent
that does not answer, or not yet, is tried again every second. What is received for a task that has ended is dropped.

Decision: only this thread ends a task's right to its rows, between two frames. So nothing is written into a row that
has been given to another lane.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from minato_gpu.lanes.base import Report, Task
from minato_gpu.lanes.contract import Broken, Exit, KeptSamples, Lane, Message, Number, Opened, Progress, Recalled
from minato_gpu.lanes.far import wire
from minato_gpu.lanes.far.agent import Shipment
from minato_gpu.lanes.far.samples import Arrivals
from minato_gpu.lanes.leases import Leases
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.scheduling.messages import CPU
from minato_gpu.util.messages import LOGGER
from minato_gpu.util.threads import OwnThread

SILENT_S = 1.0  # silence after which an agent is lost
AGAIN_S = 1.0  # between two tries to reach an agent
_STARTS_S = 60.0  # silence allowed while its workers start
_DESCRIBE_S = 15.0  # longest wait for an agent's stacks
_CREEP = 1e-4  # most clock drift, seconds per second


class TaskEnded(NamedTuple):
    """Says that no sample of a task from number ``done`` on will come."""

    number: Number
    done: int


class FarLane(Lane):
    """Workers of an agent, whose address ``find`` returns. ``shipment``: sent first on each connection."""

    kind = CPU
    on_host = False
    can_kill = shows_progress = True
    advice = "It was not replaced: on_worker_death is 'raise'."

    def __init__(self, find: Callable[[], str], shipment: Shipment, links: WorkerChannels) -> None:
        self.name, self.slots = shipment.lane, shipment.workers
        self.leases = Leases(links)
        self._find, self._shipment, self._links = find, shipment, links
        self._news: deque[Message | TaskEnded] = deque()  # from the lane's thread
        self._lock = threading.Lock()  # over the next two
        self._wire: wire.FrameSocket | None = None  # None while the agent is not connected: tasks end at once
        self._tasks: dict[Number, tuple[Task, int]] = {}  # running tasks, with their finished samples
        self._arrivals = Arrivals(links)
        self._descriptions: queue.SimpleQueue[str] = queue.SimpleQueue()  # answers to "describe": stacks of workers
        self._ring_from = 0  # chunk numbers below this one wake nobody as they end
        self._times_lost = self._received_before = 0
        self._closed = threading.Event()
        self._open = 0  # worker slots announced by ``Opened``
        self._end: socket.socket | None = None
        self._last_error = ""
        self._clock_s = float("inf")  # seconds to add to the agent's times
        self._clock_at = perf_counter()  # when that was updated
        self._thread = OwnThread(target=self._run, name="minato-far", daemon=True)
        self._thread.start()

    # --- commands ------------------------------------------------------------------------------------------

    def send(self, task: Task, worker: int = 0) -> None:
        """Sends a task. If the agent is not connected, the task is reported as ended, with no sample."""
        self.leases.add(task)
        number = task.run, task.chunk
        with self._lock:
            if self._wire is not None:
                self._tasks[number] = task, 0
                self._wire.send("send", task.elsewhere())
                return
        self._tell(TaskEnded(number, 0))

    def _ask(self, *what: Any) -> bool:
        """Sends a command; returns whether the agent is connected and has tasks."""
        if (connected := self._wire) is not None:
            connected.send(*what)
        return connected is not None and bool(self._tasks)

    def recall(self) -> None:
        """Asks the agent for the tasks that have not begun, which answers by ``Recalled``."""
        self._ask("recall")

    def revoke(self, run: int, chunk: int, keep: int) -> None:
        """Asks the agent to start no sample of the task from ``keep`` on."""
        if (run, chunk) in self.leases:
            self._ask("revoke", run, chunk, keep)

    def look(self) -> None:
        """Asks the agent what is finished and what its workers do.

        If the agent is not connected, or has no task, the answer is an empty ``Progress``.
        """
        if not self._ask("look"):
            self._tell(Progress(()))

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Has the agent start another worker. ``blocks`` is ignored: the dead worker's results are stored here."""
        self._ask("replace", worker)

    def kill(self, worker: int, hung: str) -> None:
        """Has the agent end a worker that has hung."""
        self._ask("kill", worker, hung)

    # --- messages ------------------------------------------------------------------------------------------

    def sleep(self, *, every_task: bool) -> None:
        """Called before the receiver waits: sets which tasks wake it as they end.

        These are all of them, or only those after which workers have little left to do.
        """
        self._ring_from = 0 if every_task else self.leases.low(self.slots)

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        """Returns, in this order: how many samples of revoked tasks the agent will still prepare, reports of finished
        samples, all other messages.

        ``only``: if there is no message, report these tasks alone.
        """
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
        return [*first, *reports, *last]

    def _tell(self, message: Message | TaskEnded) -> None:
        """Passes a message on."""
        self._news.append(message)
        self._links.announce(opened=isinstance(message, Opened))

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
        while not self._descriptions.empty():  # of an earlier question, or of a connection that was lost
            self._descriptions.get()
        self._ask("describe", *what)
        with suppress(queue.Empty):
            return self._descriptions.get(timeout=_DESCRIBE_S) if self._wire is not None else ""
        return ""

    def stats(self) -> Mapping[str, bool | int | float]:
        """Returns whether the agent is connected, how often it was lost, and the bytes that it has sent."""
        connected = self._wire
        received = self._received_before + (0 if connected is None else connected.received)
        return {"connected": connected is not None, "lost": self._times_lost, "received_bytes": received}

    def close(self, timeout: float) -> bool:
        """Disconnects, so that the agent's workers end, and waits for this lane's thread, however long ``timeout`` is.
        Returns True."""
        self._closed.set()
        if (end := self._end) is not None:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        return True

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Connects and receives, again and again until ``close``, or until the agent says that it cannot do the work.

        An unexpected error ends the loader; otherwise it would wait for tasks that no worker prepares.
        """
        try:
            while not self._closed.is_set():
                self._serve_one()
                self._closed.wait(AGAIN_S)
        except Exception as error:
            text = f"the agent at {self.name} cannot do this loader's work: {error}"
            self._tell(Broken(RuntimeError(text)))

    def _serve_one(self) -> None:
        """Connects to the agent, and receives until that connection ends."""
        try:
            connected, hello = wire.reach(self._find(), self._hold)
        except (OSError, wire.AgentError) as error:
            why = str(error)  # whoever keeps the record is not to keep the frames, and the loader with them
            if why and why != self._last_error and not self._closed.is_set():
                LOGGER.warning("%s cannot be reached, and is tried again every second: %s", self.name, why)
                self._last_error = why
            return
        self.slots = hello["cores"]
        try:
            self._begin(connected)
            while True:
                self._take_in(*connected.receive(self._place))
        except OSError:
            pass
        except Exception:
            self._closed.set()
            raise
        finally:
            self._lose(connected)

    def _hold(self, end: socket.socket) -> None:
        """Notes the socket that is about to be connected, for ``close``."""
        self._end = end
        if self._closed.is_set():
            raise ConnectionAbortedError("the loader has been closed")

    def _begin(self, connected: wire.FrameSocket) -> None:
        """Sends the shipment on a new connection."""
        self._last_error, self._clock_s = "", float("inf")
        self._links.late_ends.append(connected.end)
        connected.end.settimeout(_STARTS_S)
        connected.send(self._shipment._replace(workers=self.slots))
        self._wire = connected

    def _lose(self, connected: wire.FrameSocket) -> None:
        """Drops a connection that has ended, and with it the agent's tasks and slots."""
        connected.shut()  # whoever sends now may hold the lock
        with self._lock:
            self._wire = None
            ended = [TaskEnded(number, done) for number, (_, done) in self._tasks.items()]
            self._tasks.clear()
        with suppress(ValueError):
            self._links.late_ends.remove(connected.end)
        connected.close()
        self._times_lost += not self._closed.is_set()
        self._received_before += connected.received
        self._arrivals.drop()
        for each in ended:
            self._tell(each)
        self._tell(Progress(()))
        if self._open:
            self._tell(Opened(-self._open))
        self._open = 0
        self._descriptions.put("")
        if not self._closed.is_set():
            LOGGER.warning("%s is lost; others prepare what it had. It is tried again every second.", self.name)

    def _take_in(self, kind: str, *what: Any) -> None:
        """Takes in a frame. The last item is the agent's time when it was sent."""
        now = perf_counter()
        # the smallest recent difference is that of the quickest message
        self._clock_s = min(self._clock_s + _CREEP * (now - self._clock_at), now - what[-1])
        self._clock_at = now
        if kind == "samples":
            self._take(what[0])
        elif kind == "message":
            self._on_message(what[0])
        elif kind == "described":
            self._descriptions.put(what[0])
        elif kind == "error":
            raise RuntimeError(what[0])

    def _on_message(self, message: Any) -> None:
        """Passes on a message that reports no samples, with the agent's times as this host's."""
        if isinstance(message, Progress):
            message = Progress(tuple(replace(each, since=each.since + self._clock_s) for each in message.at_work))
        elif isinstance(message, Exit):
            self._pop(message.claim[:2])
            self._open -= not message.start_error
        elif isinstance(message, Recalled):
            tasks = tuple([each for each in message.tasks if self._pop(each)])
            if not tasks:
                return
            message = Recalled(tasks)
        elif isinstance(message, Opened):
            self._open += message.slots
            if self._wire is not None:
                self._wire.end.settimeout(SILENT_S)
        self._tell(message)

    def _pop(self, number: Number) -> bool:
        """Removes a task from those that have not ended. Returns False if it was not among them."""
        with self._lock:
            return self._tasks.pop(number, None) is not None

    def _place(self, head: tuple[Any, ...]) -> list[memoryview] | None:
        """Returns where a frame's samples are to be stored; None if it has none, or their task has ended."""
        entry = self._tasks.get(head[1][:2]) if head[0] == "samples" else None
        return None if entry is None else self._arrivals.place(entry[0], head[1])

    def _take(self, report: Report) -> None:
        """Marks samples that have been stored as finished, and ends their task after the last one."""
        number = report.run, report.chunk
        if number not in self._tasks:
            return
        task, _ = self._tasks[number]
        self._arrivals.mark(task, report, self._clock_s)
        self._tasks[number] = task, report.done
        if report.final:
            self._pop(number)
            if report.chunk >= self._ring_from or report.done < sum(len(piece.keys) for piece in task.pieces):
                self._tell(TaskEnded(number, report.done))
