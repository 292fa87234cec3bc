"""The lane of one agent, in the loader's process.

One thread receives what all agents of the loader send (receiver.py). It puts samples where a worker here would, in rows
of their place or in the engine's arena, and marks them (memory/completions.py): reports, and waking whoever waits, are
then what they are for workers of this host.

A node that sends nothing for a second, or whose connection breaks, is lost: the thread gives back its tasks and takes
its slots away. Others prepare those samples with the same draws; no sample is blamed. It is tried again every second,
and has slots again once it answers. What is received for a task that has ended is dropped.

Decision: only this thread ends a task's right to its rows, between two frames. So nothing is written into a row that
has been given to another lane.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

from minato_gpu.lanes.base import Blob, Handed, Report, Task, TicketOutcome
from minato_gpu.lanes.contract import (
    Broken,
    Exit,
    KeptSamples,
    Lane,
    Message,
    Number,
    Opened,
    Progress,
    Recalled,
)
from minato_gpu.lanes.far import greeting
from minato_gpu.lanes.far.agent import Shipment, blob_of, in_rows
from minato_gpu.lanes.far.frames import FrameSocket, between, bytes_of_rows
from minato_gpu.lanes.far.receiver import Receiver
from minato_gpu.lanes.leases import Leases
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.completions import IN_ROW, LOCAL, Location
from minato_gpu.memory.status_board import RING_FROM
from minato_gpu.scheduling.messages import CPU
from minato_gpu.util.messages import LOGGER
from minato_gpu.util.threads import OwnThread

SILENT_S = 1.0  # silence after which a node is lost
AGAIN_S = 1.0  # between two tries to reach a node
_STARTS_S = 60.0  # silence allowed while its workers start
_BEAT_S = 5.0  # between two heartbeats
_DESCRIBE_S = 15.0  # longest wait for an agent's stacks
_FRAMES = 16  # of one node before the next one's turn
_CREEP = 1e-4  # most clock drift, seconds per second


class FarLane(Lane):
    """Workers of an agent. ``address``: resolved; ``shipment``: sent first on each connection."""

    kind = CPU
    on_host = False
    rings = can_kill = shows_progress = True
    advice = "It was not replaced: on_worker_death is 'raise'."

    def __init__(
        self, address: tuple[Any, Any], slots: int, shipment: Shipment, links: WorkerChannels, receiver: Receiver
    ) -> None:
        self.name, self.slots = shipment.lane, slots
        self.wire: FrameSocket | None = None  # while the node is there
        self.leases = Leases(links)
        self._links, self._store, self._receiver = links, Store(-1, links), receiver
        self._address, self._shipment = address, shipment
        self._lock = threading.Lock()  # over what follows: commands come from one thread, what is received from another
        self._tasks: dict[Number, tuple[Task, int]] = {}  # that have not ended, each with its finished samples
        self._lost = False  # tasks are given back at once
        self._open = 0  # worker slots announced by ``Opened``
        self._answers: deque[Message | tuple[Number, int]] = deque()  # also tasks that end early: number, samples done
        self._exits: deque[Exit | Progress] = deque()  # come after what was reported
        self._ring_from = 0
        self._is_signalled = self._looks = False
        self._clock_s, self._clock_at = float("inf"), perf_counter()  # to add to theirs; when it was updated
        self._described: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._numbers = count()
        self._signal, self._counts = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), {"lost": 0, "received_bytes": 0}
        self._closed, self.left = threading.Event(), threading.Event()
        self._end: socket.socket | None = None  # while it is being connected
        self._last_error = ""
        self._last_beat_s = 0.0
        self._placing: list[int] = []  # blocks of the frame that is being received
        receiver.join(self)
        self._connect_apart()

    # --- commands ------------------------------------------------------------------------------------------

    def _send_frame(self, *what: Any) -> None:
        if (wire := self.wire) is not None:
            wire.send(*what)

    def send(self, task: Task, worker: int = 0) -> None:
        """Sends a task, or keeps it until the agent is connected. From a lost node it comes back at once."""
        with self._lock:
            self.leases.add(task)
            self._tasks[task.run, task.chunk] = task, 0
            if self._lost:
                self._give_back((task.run, task.chunk))
            else:
                self._send_frame(*_parcel(task))

    def recall(self) -> None:
        """Takes back the tasks that have not begun: at once if no agent is connected, else when it answers."""
        with self._lock:
            tasks = () if self.wire is not None else tuple(self._tasks)  # an agent that is not connected has none
            for number in tasks:
                del self._tasks[number]
        if tasks:
            self._answers.append(Recalled(tasks))
            self._notify()
        self._send_frame("recall")

    def revoke(self, run: int, chunk: int, keep: int) -> None:
        """Asks the agent to start no sample of the task from ``keep`` on."""
        if (run, chunk) in self._tasks:
            self._send_frame("revoke", run, chunk, keep)

    def hand_over(self, run: int, chunk: int, splits: Sequence[int]) -> None:
        """Asks the agent to hand over the running sample at the next of ``splits`` (split points)."""
        self._send_frame("hand_over", run, chunk, tuple(splits))

    def look(self) -> None:
        """Asks the agent what is finished and what its workers are at; answers itself if no task is there."""
        self._looks = True
        if self._tasks and self.wire is not None:
            self._send_frame("look")
        else:
            self._exits.append(Progress(()))

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Has the agent start another worker; what the dead one had finished is stored here."""
        self._send_frame("replace", worker)

    def kill(self, worker: int, hung: str) -> None:
        """Has the agent end a worker that has hung."""
        self._send_frame("kill", worker, hung)

    # --- messages ------------------------------------------------------------------------------------------

    def fds(self) -> list[int]:
        """Returns the descriptor that messages make readable."""
        return [self._signal]

    def sleep(self, *, every_task: bool) -> None:
        """Notes which tasks' ends wake the receiver that is about to wait: all, or those at which work runs low."""
        self._ring_from = 0 if every_task else self.leases.low(self.slots)

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        """Returns what was received: reports of samples that are marked, then the ends of workers.

        ``only``: returns no more than reports of these tasks.
        """
        if only:
            return [report for each in only if (report := self.leases.report(*each)) is not None]
        if self._is_signalled:
            with suppress(BlockingIOError):
                os.eventfd_read(self._signal)
            self._is_signalled = False
        last = [self._exits.popleft() for _ in range(len(self._exits))]  # before marks are read
        out: list[Message] = [*self.leases.reports(unfinished=self._looks or bool(last))]
        while self._answers:
            out += self._messages_from(self._answers.popleft())
        for message in last:
            if isinstance(message, Exit):
                self.leases.drop(message.claim.run, message.claim.chunk)
            else:
                self._looks = False
        return [*out, *last]

    def _messages_from(self, answer: Message | tuple[Number, int]) -> list[Message]:
        """Returns the messages of an answer, or of a task's end before its last sample."""
        if isinstance(answer, tuple) and not isinstance(answer, Report):
            self.leases.shorten(*answer)
            report = self.leases.report(*answer[0])
            return [] if report is None else [report]
        if isinstance(answer, KeptSamples):
            if (answer.run, answer.chunk) not in self.leases:
                return []
            self.leases.shorten((answer.run, answer.chunk), answer.keep)
        for number in answer.tasks if isinstance(answer, Recalled) else ():
            self.leases.drop(*number)
        return [answer]

    def _notify(self) -> None:
        """Wakes whoever waits for a message."""
        if not self._is_signalled:
            self._is_signalled = True
            os.eventfd_write(self._signal, 1)
        self._links.bell.ring()

    # --- connecting (in a thread that ends when it is done) ------------------------------------------------

    def _connect_apart(self) -> None:
        self._connector = OwnThread(target=self._connect, name="minato-connect", daemon=True)
        self._connector.start()

    def _connect(self) -> None:
        while not self._closed.is_set():
            end = self._end = socket.socket(self._address[0], socket.SOCK_STREAM)
            try:
                end.settimeout(greeting.LIMIT_S)
                end.connect(self._address[1])
                greeting.greet(end, self.name)
                end.settimeout(None)
                wire = FrameSocket(end, self._place)
            except (OSError, greeting.AgentError) as error:
                end.close()
                if str(error) != self._last_error and not self._closed.is_set():
                    self._last_error = str(error)
                    LOGGER.warning("%s cannot be reached, and is tried again every second: %s", self.name, error)
                self._closed.wait(AGAIN_S)
                continue
            self._links.late_ends.append(end)
            wire.send(self._shipment)
            if not self._receiver.post(partial(self._receiver.add, self, wire)):
                wire.close()
            return

    # --- in the receiving thread ---------------------------------------------------------------------------

    def begin(self, wire: FrameSocket) -> None:
        """Takes up a new connection, and sends all waiting tasks on it."""
        self._end, self._last_error, wire.heard = None, "", perf_counter()
        self._clock_s = float("inf")
        with self._lock:
            self.wire, self._lost = wire, False
            for task, _ in self._tasks.values():
                self._send_frame(*_parcel(task))

    def take_in(self) -> bool:
        """Takes in what has come; returns whether there may be more."""
        wire = self.wire
        assert wire is not None
        wire.flush()
        for number, (kind, *what, theirs) in enumerate(wire.receive(), 1):
            self._clock(theirs)
            if kind == "samples":
                self._take(what[0])
            elif kind == "told":
                self._on_message(what[0])
            elif kind == "described":
                self._described.put((what[0], what[1]))
            elif kind == "error":
                self.fail(what[0])
            if number == _FRAMES:
                return True
        return False

    def attend(self, now: float, *, late: bool) -> bool:
        """Sends a heartbeat if one is due; returns whether the node is alive. ``late``: silence is forgiven."""
        wire = self.wire
        assert wire is not None
        if late:
            wire.heard = now
        if now > self._last_beat_s + _BEAT_S:
            self._last_beat_s = now
            wire.send("beat")
        return wire.open and now < wire.heard + (SILENT_S if self._open else _STARTS_S)

    def fileno(self) -> int:
        """Returns the connection's descriptor."""
        return -1 if self.wire is None else self.wire.end.fileno()

    @property
    def wants(self) -> int:
        """Epoll events to wait for."""
        return select.EPOLLIN | (select.EPOLLOUT if self.wire is not None and self.wire.unsent else 0)

    def lose(self) -> None:
        """Drops the dead connection, gives its tasks back, and reconnects."""
        with self._lock:
            wire, self.wire, self._lost = self.wire, None, True
            assert wire is not None
            for number in list(self._tasks):
                self._give_back(number)
        self._counts["lost"] += 1
        self._counts["received_bytes"] += wire.received
        with suppress(ValueError):
            self._links.late_ends.remove(wire.end)
        wire.close()
        for offset in self._placing:
            self._links.engine_arena.free(offset)
        self._placing = []
        self._exits.append(Progress(()))
        if self._open:
            self._answers.append(Opened(-self._open))
            self._open = 0
        self._notify()
        if not self._closed.is_set():
            LOGGER.warning("%s is lost; others prepare what it had. It is tried again every second.", self.name)
            self._connect_apart()

    def _clock(self, theirs: float) -> None:
        """Updates the clock offset in seconds: the smallest recent (ours - theirs), of the quickest message."""
        now = perf_counter()
        self._clock_s = min(self._clock_s + _CREEP * (now - self._clock_at), now - theirs)
        self._clock_at = now

    def _place(self, head: tuple[Any, ...], nbytes: int) -> list[memoryview] | None:
        """Returns buffers for a frame's body (None: its task has ended): rows, and new blocks of the engine's arena.

        Blobs in the report are replaced by those blocks.
        """
        report: Report = head[1]
        entry = self._tasks.get((report.run, report.chunk))
        if entry is None:
            return None
        task, views = entry[0], list[memoryview]()
        if in_rows(report):
            for number, begin, end in between(_sizes(task), report.first, report.done):
                piece = task.pieces[number]
                if piece.slab >= 0 and task.layout:
                    rows = self._store.views(piece.slab, piece.rows, task.layout)
                    views += bytes_of_rows(rows, piece.row + begin, piece.row + end)
        for at, item in enumerate(report.items or ()):
            if (blob := blob_of(item)) is None:
                continue
            arena, blocks = self._links.engine_arena, list[tuple[int, int]]()
            for _, size in blob.blocks:
                offset = arena.allocate(size)
                self._placing.append(offset)
                blocks.append((offset, size))
                views.append(arena.buffer[offset : offset + size])
            placed = Blob(-1, tuple(blocks), blob.collated)
            assert report.items is not None
            report.items[at] = Handed(placed, item.stage) if isinstance(item, Handed) else placed
        return views

    def _take(self, report: Report) -> None:
        """Marks samples that have arrived."""
        number = report.run, report.chunk
        self._placing = []
        if number not in self._tasks:
            return
        task, _ = self._tasks[number]
        self._tasks[number] = task, report.done
        samples, locations = report.done - report.first, self._locations(task, report)
        times = report.times or [(report.own_s or 0.0) / samples] * samples if samples else []
        ends = [end + self._clock_s for end in report.ends or [report.end] * samples]
        elapsed, stop = report.seconds, samples
        for piece, begin, end in reversed([*between(_sizes(task), report.first, report.done)]):
            at = stop - (end - begin)  # the last first: where the first is marked, all are
            which, mark = slice(at, stop), task.pieces[piece].marks + begin
            when = ends[at] if stop == at + 1 else ends[which]
            where = None if locations is None else locations[which]
            self._links.bell.publish(mark, times[which], when, elapsed, report.worker, where)
            elapsed, stop = 0.0, at
        if report.final and report.done == sum(_sizes(task)):
            del self._tasks[number]
            if report.chunk >= min(self._ring_from, self._links.board.words[RING_FROM]):
                self._notify()
        elif report.final:
            self._give_back(number)

    def _locations(self, task: Task, report: Report) -> list[Location] | None:
        """Returns each sample's location, to be marked (see leases.py); None: all are plain rows."""
        items, parts = report.items, report.parts
        if items is None and parts is None and report.layout is None and not report.prepared:
            return None
        found, local = list[Location](), self._links.completions.local
        for number, begin, end in between(_sizes(task), report.first, report.done):
            for mark in range(task.pieces[number].marks + begin, task.pieces[number].marks + end):
                at = len(found)
                outcome = TicketOutcome(None if items is None else items[at], None if parts is None else parts[at])
                if not at:
                    outcome = outcome._replace(layout=report.layout, prepared=report.prepared)
                if outcome == TicketOutcome(None):
                    found.append(IN_ROW)
                else:
                    local[mark] = outcome
                    found.append((LOCAL, 0, 0))
        return found

    def _give_back(self, number: Number) -> None:
        """Ends a task here; its unmarked samples go to other lanes."""
        _, done = self._tasks.pop(number)
        self._answers.append((number, done))
        self._notify()

    def _on_message(self, message: Message) -> None:
        """Takes any message but samples."""
        if isinstance(message, Progress):
            at_work = (replace(each, since=each.since + self._clock_s) for each in message.at_work)
            self._exits.append(Progress(tuple(at_work)))
        elif isinstance(message, Exit):
            self._tasks.pop(message.claim[:2], None)
            self._open -= not message.start_error
            self._exits.append(message)
        elif isinstance(message, Recalled):
            tasks = tuple(each for each in message.tasks if self._tasks.pop(each, None) is not None)
            if tasks:
                self._answers.append(Recalled(tasks))
        elif isinstance(message, (Opened, KeptSamples)):
            self._open += message.slots if isinstance(message, Opened) else 0
            self._answers.append(message)
        self._notify()

    def fail(self, why: object) -> None:
        """Gives the node up for good: it cannot do this loader's work, or its samples cannot be received."""
        self._answers.append(Broken(RuntimeError(f"the agent at {self.name} cannot do this loader's work: {why}")))
        self._closed.set()
        self._notify()

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
        number, answered, text = next(self._numbers), -1, ""
        self._send_frame("describe", number, *what)
        with suppress(queue.Empty):
            while self.wire is not None and answered != number:  # an answer may have come too late for its question
                answered, text = self._described.get(timeout=_DESCRIBE_S)
        return text if answered == number else ""

    def stats(self) -> Mapping[str, bool | int | float]:
        """Returns whether the node is there, how often it was lost, and the bytes that it has sent."""
        wire = self.wire
        received = self._counts["received_bytes"] + (0 if wire is None else wire.received)
        return {"connected": wire is not None, "lost": self._counts["lost"], "received_bytes": received}

    def close(self, timeout: float) -> bool:
        """Leaves the node, whose workers end; returns once nothing more is received."""
        if self._signal < 0:
            return True
        self._closed.set()
        if (end := self._end) is not None:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._receiver.post(lambda: self._receiver.leave(self))
        self.left.wait()
        self._connector.join()
        os.close(self._signal)
        self._signal = -1
        return True


def _sizes(task: Task) -> list[int]:
    return [len(piece.keys) for piece in task.pieces]


def _parcel(task: Task) -> tuple[Any, ...]:
    """Returns a task as it is sent to an agent."""
    return "send", task.elsewhere(), tuple(piece.slab >= 0 for piece in task.pieces)
