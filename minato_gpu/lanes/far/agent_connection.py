"""The loader's side of one agent: a thread that connects, and receives samples (arrivals.py) and messages.

An agent that sends nothing for a second, or whose connection breaks, is lost: its tasks end here, and its slots are
gone. Others prepare those samples with the same draws; no sample is blamed. An agent that does not answer, or not yet,
is tried again every second. What is received for a task that has ended is dropped.

Decision: only this thread ends a task's right to its rows, between two frames. So nothing is written into a row that
has been given to another lane.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from minato_gpu.lanes.base import Report, Task
from minato_gpu.lanes.contract import Broken, Exit, Message, Number, Opened, Progress, Recalled
from minato_gpu.lanes.far import greeting
from minato_gpu.lanes.far.arrivals import Arrivals
from minato_gpu.lanes.far.frames import FrameSocket
from minato_gpu.lanes.far.session import Shipment
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.util.messages import LOGGER
from minato_gpu.util.threads import OwnThread

SILENT_S = 1.0  # silence after which an agent is lost
AGAIN_S = 1.0  # between two tries to reach an agent
_STARTS_S = 60.0  # silence allowed while its workers start
_CREEP = 1e-4  # most clock drift, seconds per second


class TaskEnded(NamedTuple):
    """Says that no sample of a task from number ``done`` on will come."""

    number: Number
    done: int


class AgentConnection:
    """The connection to one agent, and the thread that receives from it; connects again when it is lost.

    ``find`` returns the agent's address; ``shipment`` is sent first on each connection; ``tell`` is called with each
    message from the agent, in this connection's thread.
    """

    def __init__(
        self,
        find: Callable[[], str],
        shipment: Shipment,
        links: WorkerChannels,
        tell: Callable[[Message | TaskEnded], None],
    ) -> None:
        self.name, self.workers = shipment.lane, shipment.workers
        self.wire: FrameSocket | None = None  # None while the agent is not connected
        self.times_lost = self.received_before = 0
        self.ring_from = 0  # chunk numbers below this one wake nobody as they end
        self.descriptions: queue.SimpleQueue[str] = queue.SimpleQueue()  # answers to "describe": stacks of workers
        self._find, self._shipment, self._links, self._tell = find, shipment, links, tell
        self._arrivals = Arrivals(links)
        self._lock = threading.Lock()  # over the next three
        self._tasks: dict[Number, tuple[Task, int]] = {}  # running tasks, with their finished samples
        self._lost = False  # the agent was lost and is not connected again: tasks end at once
        self._closed = threading.Event()
        self._open = 0  # worker slots announced by ``Opened``
        self._end: socket.socket | None = None
        self._last_error = ""
        self._clock_s = float("inf")  # seconds to add to the agent's times
        self._clock_at = perf_counter()  # when that was updated
        self._thread = OwnThread(target=self._run, name="minato-far", daemon=True)
        self._thread.start()

    # --- for the lane --------------------------------------------------------------------------------------

    def send(self, task: Task) -> None:
        """Sends a task, or keeps it until the agent is connected. If the agent is lost, the task ends at once."""
        with self._lock:
            if self._lost:
                self._tell(TaskEnded((task.run, task.chunk), 0))
                return
            self._tasks[task.run, task.chunk] = task, 0
            self.ask("send", *_parcel(task))

    def ask(self, *what: Any) -> bool:
        """Sends a command; returns whether the agent is connected and has tasks."""
        if (wire := self.wire) is not None:
            wire.send(*what)
        return wire is not None and bool(self._tasks)

    def recall(self) -> None:
        """Takes back the tasks that have not begun: at once if no agent is connected, else when it answers."""
        with self._lock:
            if self.wire is None and self._tasks:
                self._tell(Recalled(tuple(self._tasks)))
                self._tasks.clear()
            self.ask("recall")

    def close(self) -> None:
        """Disconnects; the agent's workers end. Returns once nothing more is received. Idempotent."""
        self._closed.set()
        if (end := self._end) is not None:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Connects and receives, again and again until ``close``, or until the agent says that it cannot do the work.

        What nobody expects ends the loader with an error: tasks that nobody is at would be waited for.
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
            wire, hello = greeting.reach(self._find(), self._hold)
        except (OSError, greeting.AgentError) as error:
            why = str(error)  # whoever keeps the record is not to keep the frames, and the loader with them
            if why and why != self._last_error and not self._closed.is_set():
                LOGGER.warning("%s cannot be reached, and is tried again every second: %s", self.name, why)
                self._last_error = why
            return
        self.workers = hello["cores"]
        try:
            self._begin(wire)
            while True:
                self._take_in(*wire.receive(self._place))
        except OSError:
            pass
        except Exception:
            self._closed.set()
            raise
        finally:
            self._lose(wire)

    def _hold(self, end: socket.socket) -> None:
        """Notes the socket that is about to be connected, for ``close``."""
        self._end = end
        if self._closed.is_set():
            raise ConnectionAbortedError("the loader has been closed")

    def _begin(self, wire: FrameSocket) -> None:
        """Sends the shipment and all waiting tasks on a new connection."""
        self._last_error, self._clock_s = "", float("inf")
        self._links.late_ends.append(wire.end)
        wire.end.settimeout(_STARTS_S)
        wire.send(self._shipment._replace(workers=self.workers))
        with self._lock:
            self.wire, self._lost = wire, False
            for task, _ in self._tasks.values():
                wire.send("send", *_parcel(task))

    def _lose(self, wire: FrameSocket) -> None:
        """Drops a connection that has ended, and with it the agent's tasks and slots."""
        wire.shut()  # whoever sends now may hold the lock
        with self._lock:
            self.wire, self._lost = None, True
            ended = [TaskEnded(number, done) for number, (_, done) in self._tasks.items()]
            self._tasks.clear()
        with suppress(ValueError):
            self._links.late_ends.remove(wire.end)
        wire.close()
        self.times_lost += not self._closed.is_set()
        self.received_before += wire.received
        self._arrivals.drop()
        for each in ended:
            self._tell(each)
        self._tell(Progress(()))
        if self._open:
            self._tell(Opened(-self._open))
        self._open = 0
        self.descriptions.put("")
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
            self.descriptions.put(what[0])
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
            if self.wire is not None:
                self.wire.end.settimeout(SILENT_S)
        self._tell(message)

    def _pop(self, number: Number) -> bool:
        """Removes a task from those that have not ended. Returns False if it was not among them."""
        with self._lock:
            return self._tasks.pop(number, None) is not None

    # --- samples -------------------------------------------------------------------------------------------

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
            if report.chunk >= self.ring_from or report.done < sum(len(piece.keys) for piece in task.pieces):
                self._tell(TaskEnded(number, report.done))


def _parcel(task: Task) -> tuple[Any, ...]:
    """Returns a task as it is sent to an agent, and which of its pieces' samples have rows here."""
    return task.elsewhere(), tuple(piece.slab >= 0 for piece in task.pieces)
