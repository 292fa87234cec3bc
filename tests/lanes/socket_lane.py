"""A lane whose workers are elsewhere: a process behind a TCP socket runs a normal process lane.

Nothing of the package knows of it: it is the stand-in for lanes of other machines. What is sent there says what is to
be done; what this host has for it (rows, marks, bytes that were read) stays here. Samples come back as bytes, and are
put into their rows, or into blocks of the engine's arena. The agent's clock may be any: its times are put right here.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from minato_gpu.lanes.base import Blob, Extra, Handed, Item, Piece, Report, Task
from minato_gpu.lanes.contract import Exit, Lane, Message, Number, Progress, Recalled, Retired
from minato_gpu.lanes.process_lane import ProcessLane
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.layout import Mismatch
from minato_gpu.memory.status_board import ATTENTION, CONSUMER
from minato_gpu.scheduling.messages import CPU
from minato_gpu.window.host_memory import HostMemoryAccount
from tests.lanes.lanes import FORK

_LENGTH = struct.Struct("q")
Blocks = list[bytes] | None
"""The bytes of each block of a blob."""


class Wire:
    """Pickled objects through a socket, none of whose ends ever blocks. ``open``: until the other end is closed."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.end, self.open = end, True
        self._in, self._out = bytearray(), bytearray()

    @property
    def waits(self) -> bool:
        """Whether something is left to be sent."""
        return self.open and bool(self._out)

    def send(self, *what: Any) -> None:
        data = pickle.dumps(what)
        self._out += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        try:
            while self.waits:
                del self._out[: self.end.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self.open = False

    def receive(self) -> list[Any]:
        try:
            while self.open and (data := self.end.recv(1 << 20)):
                self._in += data
            self.open = False
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        found = []
        while len(self._in) >= 8 and len(self._in) >= 8 + (size := _LENGTH.unpack_from(self._in)[0]):
            found.append(pickle.loads(self._in[8 : 8 + size]))
            del self._in[: 8 + size]
        return found

    def await_some(self, timeout_s: float) -> list[Any]:
        """What comes next, if it comes in time."""
        self.flush()
        return self.receive() if select.select([self.end], [], [], timeout_s)[0] else []

    def close(self) -> None:
        self.end.close()
        self.open = False


def shifted(message: Any, seconds: float) -> Any:
    """The message, with its times put right by so much."""
    if isinstance(message, Report):
        ends = None if message.ends is None else [end + seconds for end in message.ends]
        return message._replace(begin=message.begin + seconds, end=message.end + seconds, ends=ends)
    if isinstance(message, Progress):
        return Progress(tuple(replace(each, since=each.since + seconds) for each in message.at_work))
    return message


# --- there ------------------------------------------------------------------------------------------------


class Agent:
    """Serves one lane at the other end of a connection. ``clock_s``: how far its clock is from the others'."""

    def __init__(self, wire: Wire, job: Job, clock_s: float) -> None:
        self._wire, self._clock_s = wire, clock_s
        self._links = links = WorkerChannels(job.num_workers, addressed=False, arenas=True)
        links.board.words[ATTENTION] = CONSUMER
        self._memory = HostMemoryAccount(links, None)
        self._lane = ProcessLane(links, job, FORK, replaceable=True)
        self._marks: dict[Number, list[int]] = {}  # of tasks that have not ended
        self._asked = False  # somebody wants to know what the workers are at

    def serve(self) -> None:
        """Until the other end is closed."""
        poll = select.poll()
        for fd in (*self._lane.fds(), *self._lane.fault_fds()):
            poll.register(fd, select.POLLIN)
        self._wire.send("clock", perf_counter() + self._clock_s)
        while self._wire.open:
            self._lane.sleep(every_task=True)
            if not self._links.bell.await_tickets(*self._links.completions.ready_anywhere, 1):
                poll.register(self._wire.end, select.POLLIN | (select.POLLOUT if self._wire.waits else 0))
                poll.poll()
            self._wire.flush()
            for name, *arguments in self._wire.receive():
                getattr(self, f"_{name}", getattr(self._lane, name, None))(*arguments)  # type: ignore[misc]
            self._lane.look()
            for message in self._lane.receive():
                self._tell(message)
            self._memory.reclaim()
        self._lane.close(0.0)
        self._links.close()

    def _send(self, task: Task) -> None:
        reserve = self._links.completions.reserve
        pieces = tuple(piece._replace(marks=reserve(len(piece.keys))) for piece in task.pieces)
        self._marks[task.run, task.chunk] = [piece.marks for piece in pieces]
        self._lane.send(task._replace(pieces=pieces))

    def _look(self) -> None:
        self._asked = True

    def _describe(self, what: str, *arguments: int) -> None:
        self._wire.send("described", getattr(self._lane, what)(*arguments))

    def _tell(self, message: Message) -> None:
        if isinstance(message, Progress):
            if not self._asked:
                return
            self._asked = False
        blocks = []
        if isinstance(message, Report):
            blocks = [self._bytes_of(item) for item in message.items or ()]
        self._wire.send("told", shifted(message, self._clock_s), blocks, perf_counter() + self._clock_s)
        for task in _ended(message):
            for mark in self._marks.pop(task, ()):
                self._links.completions.give_back(mark)

    def _bytes_of(self, item: Item) -> Blocks:
        """What lies there for an item, which is free from now on."""
        lies = item.fields if isinstance(item, Handed) else item
        if not isinstance(lies, Blob):
            return None
        buffer = self._links.buffer(lies.worker)
        found = [bytes(buffer[offset : offset + nbytes]) for offset, nbytes in lies.blocks]
        self._memory.release(lies)
        return found


def _ended(message: Message) -> Sequence[Number]:
    """The tasks that have ended with this message."""
    if isinstance(message, Report):
        return [(message.run, message.chunk)] if message.final else []
    if isinstance(message, Recalled):
        return message.tasks
    return [message.claim[:2]] if isinstance(message, Exit) else []


def run_agent(listener: socket.socket, clock_s: float = 0.0, job: Job | None = None) -> None:
    """Serve the first who connects; ``job``: in the place of the one that comes, where that cannot be pickled."""
    end, _ = listener.accept()
    listener.close()
    wire = Wire(end)
    while wire.open:
        for _, sent in wire.await_some(30.0):  # nothing else is sent before the agent says what its clock shows
            Agent(wire, job or sent, clock_s).serve()
    wire.close()


class AgentProcess:
    """An agent in a process of its own, which ends with the lane that it serves."""

    def __init__(self, clock_s: float = 0.0, job: Job | None = None) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self._process = FORK.Process(target=run_agent, args=(listener, clock_s, job))
        self._process.start()
        listener.close()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Wait until it has ended."""
        self._process.join(30.0)
        self._process.kill()
        self._process.join()
        self._process.close()


# --- here -------------------------------------------------------------------------------------------------


class SocketLane(Lane):
    """Workers of an agent."""

    kind = CPU
    on_host = False
    can_kill = shows_progress = True
    advice = "It was not replaced: on_worker_death is 'raise'."

    def __init__(self, address: tuple[str, int], slots: int, job: Job | None, links: WorkerChannels) -> None:
        self.name, self.slots = f"cpu:{address[0]}:{address[1]}", slots
        self._links, self._store = links, Store(-1, links)
        self._wire = Wire(socket.create_connection(address))
        self._tasks: dict[Number, tuple[Task, int]] = {}  # those that have not ended, and how far they are
        self._arrived: list[Any] = []  # while something else was waited for
        self._retired = False
        self._wire.send("job", None if job is None else replace(job, lane=self.name, num_workers=slots))
        while self._wire.open and not (first := self._wire.await_some(30.0)):
            pass
        (_, theirs), *self._arrived = first
        self._clock_s = perf_counter() - theirs  # from theirs to ours, too much by as long as a message takes

    # --- commands ---

    def send(self, task: Task, worker: int = 0) -> None:
        self._tasks[task.run, task.chunk] = task, 0
        if self._wire.open:
            self._wire.send("send", task.elsewhere())

    def recall(self) -> None:
        self._wire.send("recall")

    def revoke(self, run: int, chunk: int, keep: int) -> None:
        self._wire.send("revoke", run, chunk, keep)

    def hand_over(self, run: int, chunk: int, splits: Sequence[int]) -> None:
        self._wire.send("hand_over", run, chunk, splits)

    def look(self) -> None:
        self._wire.send("look")

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        self._wire.send("replace", worker, blocks)

    def kill(self, worker: int, hung: str) -> None:
        self._wire.send("kill", worker, hung)

    # --- messages ---

    def fds(self) -> list[int]:
        return [] if self._retired else [self._wire.end.fileno()]

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        self._wire.flush()
        arrived, self._arrived = [*self._arrived, *self._wire.receive()], []
        told = [self._taken(*what) for _, *what in arrived]
        if not self._wire.open:
            told += map(self._given_back, list(self._tasks))
            told += [] if self._retired else [Retired()]
            self._retired = True
        return told

    def _given_back(self, number: Number) -> Report:
        """Nobody is at the task any more; what is reported of it is here."""
        (run, chunk), (_, done), now = number, self._tasks.pop(number), perf_counter()
        return Report(run, chunk, 0, done, done, 0.0, now, now, True)

    def _taken(self, message: Message, blocks: Sequence[Blocks], theirs: float) -> Message:
        """A message of the agent's, as it is here; the quickest one so far says best what its clock shows."""
        self._clock_s = min(self._clock_s, perf_counter() - theirs)
        message = shifted(message, self._clock_s)
        if isinstance(message, Report):
            task, _ = self._tasks[message.run, message.chunk]
            self._tasks[message.run, message.chunk] = task, message.done
            if message.items is not None:
                message = self._placed(task, message, message.items, blocks)
        for number in _ended(message):
            self._tasks.pop(number, None)
        return message

    def _placed(self, task: Task, report: Report, items: list[Item], blocks: Sequence[Blocks]) -> Report:
        places = [(piece, at) for piece in task.pieces for at in range(len(piece.keys))][report.first :]
        of_run = zip(places, items, blocks, strict=False) if task.kind == "run" else ()
        found = [self._put(task, *place, item, lies) for place, item, lies in of_run]
        return report._replace(items=found)

    def _put(self, task: Task, piece: Piece, at: int, item: Item, blocks: Blocks) -> Item:
        """Put a sample where this host wants it: into its row, or into blocks of the engine's arena."""
        if blocks is None:
            return item
        blob = Blob(-1, tuple(map(self._lay_down, blocks)), getattr(item, "collated", False))
        if isinstance(item, Handed):
            return Handed(blob, item.stage)
        if piece.slab < 0 or not task.layout or blob.collated:
            return blob
        layout = self._store.layout(task.layout)
        try:
            objects = layout.writer(self._store.views(piece.slab, piece.rows, task.layout))(
                piece.row + at, self._store.get(blob, lasting=True)
            )
        except Mismatch:
            return blob
        self._links.loans.give_back(blob.places)
        return None if objects is None else Extra(objects)

    def _lay_down(self, data: bytes) -> tuple[int, int]:
        arena = self._links.engine_arena
        offset = arena.allocate(len(data))
        np.frombuffer(arena.buffer, np.uint8, len(data), offset)[:] = np.frombuffer(data, np.uint8)
        return offset, len(data)

    # --- what is said of it, and the end ---

    def who(self, worker: int) -> str:
        return f"worker {worker} of {self.name}"

    def stack_of_hung(self, worker: int) -> str:
        return self._described("stack_of_hung", worker)

    def stacks_at_work(self) -> str:
        return self._described("stacks_at_work")

    def _described(self, *what: Any) -> str:
        self._wire.send("describe", *what)
        while self._wire.open:
            for message in self._wire.await_some(10.0):
                if message[0] == "described":
                    return str(message[1])
                self._arrived.append(message)
        return ""

    def close(self, timeout: float) -> bool:
        if self._wire.end.fileno() >= 0:
            self._retired = True
            self._wire.close()
        return True


class SocketLanes:
    """Lanes of agents at these addresses, each with so many workers."""

    def __init__(self, addresses: Iterable[tuple[str, int]], each: int) -> None:
        self._addresses, self._each = list(addresses), each
        self.slots = each * len(self._addresses)

    def open(self, job: Job, links: WorkerChannels) -> Iterable[Lane]:
        """See LaneSource."""
        for address in self._addresses:
            yield SocketLane(address, self._each, job, links)
