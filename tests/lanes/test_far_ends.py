"""How connections of the far lane end and begin again, and what neither side may be made to wait for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import minato_gpu
from minato_gpu.lanes.base import Report
from minato_gpu.lanes.contract import Broken, Message, Opened
from minato_gpu.lanes.far import agent, lane, ray_lanes, wire
from minato_gpu.lanes.far.agent import Shipment
from minato_gpu.lanes.far.lane import FarLane
from minato_gpu.lanes.far.samples import Arrivals
from minato_gpu.lanes.far.wire import FrameSocket
from minato_gpu.lanes.worker_channels import WorkerChannels
from tests.lanes.harness import job, marked, open_links, piece, task
from tests.support.agents import agents
from tests.support.waiting import wait_until

SHIPMENT = Shipment(b"", (), {}, 1 << 30, 1, "cpu:far")


pytestmark = pytest.mark.usefixtures("secret")


@pytest.fixture
def links() -> Iterator[WorkerChannels]:
    with open_links() as found:
        yield found


# --- frames -----------------------------------------------------------------------------------------------


@contextmanager
def pair() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = FrameSocket(socket.create_connection(listener.getsockname(), 20.0))
        there = FrameSocket(listener.accept()[0])
    try:
        yield here, there
    finally:
        here.close()
        there.close()


@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_body_of_another_length_than_its_memory_ends_the_connection(count: int) -> None:
    with pair() as (here, there):
        there.send("samples", body=[memoryview(bytes(count))])
        with pytest.raises(ConnectionError, match="memory of another size"):
            here.receive(lambda head: [memoryview(bytearray(4))])


def test_what_is_dropped_is_not_held() -> None:
    with pair() as (here, there):
        body = memoryview(bytes(16 << 20))
        sender = threading.Thread(target=there.send, args=("late",), kwargs={"body": [body]})
        tracemalloc.start()
        try:
            sender.start()
            assert here.receive() == ("late",)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            sender.join()
        assert peak < len(body) / 2


class FakeEnd:
    """A socket that notes how much each call sends; ``sends`` is called by each."""

    def __init__(self, sends: Callable[[], object] = lambda: None) -> None:
        self.sent, self.is_closed, self._sends = list[int](), threading.Event(), sends

    def setsockopt(self, *option: int) -> None:
        pass

    def sendall(self, data: memoryview) -> None:
        self.sent.append(len(data))
        self._sends()

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        self.is_closed.set()


def test_a_sockets_time_limit_is_for_each_megabyte() -> None:
    """Not for a whole job, which may take longer than any silence that is allowed."""
    end: Any = FakeEnd()
    FrameSocket(end).send("job", body=[memoryview(bytes(5 << 20)), memoryview(bytes(100))])
    assert sum(end.sent[1:]) == (5 << 20) + 100 and max(end.sent) == 1 << 20


def test_a_socket_is_closed_once_nobody_sends() -> None:
    """Its number may be another file's then."""
    begun, may_end = threading.Event(), threading.Event()

    def sends() -> None:
        begun.set()
        may_end.wait(20.0)

    end: Any = FakeEnd(sends)
    sender = FrameSocket(end)
    threads = [threading.Thread(target=sender.send, args=("job",)), threading.Thread(target=sender.close)]
    threads[0].start()
    assert begun.wait(20.0)
    threads[1].start()
    assert not end.is_closed.wait(0.2)
    may_end.set()
    assert end.is_closed.wait(20.0)
    for each in threads:
        each.join()


def test_a_report_of_no_samples_changes_no_record(links: WorkerChannels) -> None:
    sent = marked(links, task(piece(range(8))))
    arrivals = Arrivals(links)
    arrivals.mark(sent, Report(1, 1, 0, 0, 3, 2.0, 0.0, 2.0, False, own_s=1.5), 0.0)
    arrivals.mark(sent, Report(1, 1, 0, 3, 3, 0.0, 0.0, 2.0, True), 0.0)
    begin = sent.pieces[0].marks
    assert links.completions.take(begin, begin + 3).elapsed == 2.0


# --- the loader's side ------------------------------------------------------------------------------------


def told(made: FarLane) -> Callable[[], list[Message]]:
    """All that a lane has told so far."""
    found: list[Message] = []

    def more() -> list[Message]:
        found.extend(made.receive())
        return found

    return more


@contextmanager
def far(find: Callable[[], str], links: WorkerChannels) -> Iterator[FarLane]:
    made = FarLane(find, SHIPMENT, links)
    try:
        yield made
    finally:
        made.close(0.0)


class Waits(threading.Event):
    """An event that notes when somebody waits for it, and lets nobody wait."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self._notes = notes

    def wait(self, timeout: float | None = None) -> bool:
        self._notes.append("wait")
        return self.is_set()


@pytest.mark.usefixtures("no_leaks")
def test_an_agent_whose_sessions_end_is_not_tried_again_at_once(
    links: WorkerChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try has a process begin there, and sends it the job."""
    notes: list[str] = []
    with agents(1, 1, job=job(int)) as [other]:

        def find() -> str:
            notes.append("find")
            return other.address

        monkeypatch.setattr(lane, "threading", SimpleNamespace(Event=lambda: Waits(notes), Lock=threading.Lock))
        with far(find, links) as made:
            more = told(made)
            assert wait_until(lambda: Opened(1) in more())
            before = len(notes)
            other.sessions()[0].kill()
            assert wait_until(lambda: "find" in notes[before:])
            assert notes[before] == "wait"


@pytest.mark.usefixtures("no_leaks")
def test_what_nobody_expects_of_a_connection_ends_the_loader(links: WorkerChannels) -> None:
    def find() -> str:
        raise KeyError("no such host")

    with far(find, links) as made:
        more = told(made)
        assert wait_until(lambda: any(isinstance(each, Broken) for each in more()))


@pytest.mark.usefixtures("no_leaks")
def test_an_agent_is_not_lost_where_the_lane_is_closed(links: WorkerChannels) -> None:
    with agents(1, 1, job=job(int)) as [other], far(lambda: other.address, links) as made:
        more = told(made)
        assert wait_until(lambda: Opened(1) in more())
        made.close(0.0)
        assert made.stats()["lost"] == 0


def test_what_is_told_while_a_lane_is_asked_leaves_its_descriptor_as_it_must_be(
    links: WorkerChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readable without a message it would keep the training loop from sleeping."""
    write, others = os.eventfd_write, list[threading.Thread]()

    def interrupted(fd: int, value: int) -> None:
        others.append(threading.Thread(target=made.receive))
        others[-1].start()
        others[-1].join(0.2)  # in which it comes to its end, or has to wait for this one
        write(fd, value)

    def find() -> str:
        raise wire.AgentError  # nobody is there, and nothing is said of it

    with far(find, links) as made:
        monkeypatch.setattr(os, "eventfd_write", interrupted)
        made.look()
        monkeypatch.undo()
        for each in others:
            each.join()
        assert others
        made.receive()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(made.fds()[0])


# --- the agent's side -------------------------------------------------------------------------------------


def test_an_agent_outlives_a_moment_without_room_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """Multiprocessing, of which the first process cannot be forked."""

        failed = False

        def Process(self, **more: Any) -> Any:
            if not self.failed:
                self.failed = True
                raise BlockingIOError("no room for a process")
            return fork.Process(**more)

    fork = agent._FORK
    monkeypatch.setattr(agent, "_FORK", Full())
    with agents(1, 1) as [other]:
        with pytest.raises(wire.AgentError, match="answers nothing"):
            wire.reach(other.address)
        wire.reach(other.address)[0].close()


def last_of(end: FrameSocket) -> None:
    """Receives until the connection ends."""
    while end.receive():
        pass


def test_a_session_ends_where_a_loader_falls_silent_in_the_middle_of_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_SILENT_S", 1.0)
    with agents(1, 1, job=job(int)) as [other]:
        loader, _ = wire.reach(other.address)
        loader.send(SHIPMENT)
        while loader.receive()[:2] != ("message", Opened(1)):
            pass
        loader.end.sendall(b"half")
        with pytest.raises(ConnectionError):
            last_of(loader)
        loader.close()


@pytest.mark.usefixtures("no_leaks")
def test_workers_of_an_agent_whose_output_nobody_reads_may_print() -> None:
    """They inherit its standard output, which is a pipe that holds 64 KB."""
    command = [sys.executable, "-m", "minato_gpu", "lane", "--tied", "--cores", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(minato_gpu.__file__).parents[1])}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as started:
        assert started.stdout is not None and started.stdout.readline()
        output = Path(f"/proc/{started.pid}/fd/1")
        assert wait_until(lambda: output.resolve() == Path(os.devnull))


# --- Ray, in whose place there is something that notes what it is asked ----------------------------------------


class Actor:
    """An actor: how many cores it takes, and of which resources."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.addresses = options, list[str]()
        self.address = SimpleNamespace(remote=lambda: self.addresses.pop(0) if self.addresses else "node:1")


class FakeRay:
    """Ray with these nodes beside the one of the program."""

    exceptions = SimpleNamespace(RayError=ZeroDivisionError)

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.is_up, self.fails = True, False
        self.actors, self.killed = list[Actor](), list[Actor]()
        self._nodes = [{"NodeID": str(at), "Alive": True, "Resources": each} for at, each in enumerate(({}, *nodes))]

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "0")

    def is_initialized(self) -> bool:
        return self.is_up

    def remote(self, **more: Any) -> Any:
        def options(**own: Any) -> Any:
            def remote(*arguments: Any) -> Actor:
                self.actors.append(Actor(more | own))
                return self.actors[-1]

            return SimpleNamespace(remote=remote)

        return lambda kind: SimpleNamespace(options=options)

    def wait(self, asked: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return asked[:1], asked[1:]

    def get(self, asked: Any) -> Any:
        if self.fails:
            raise ZeroDivisionError
        return asked

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


@pytest.mark.parametrize(
    ("cores", "sizes", "shares"),
    [
        (64, [128] * 4, [16] * 4),
        (64, [128, 16], [16] * 4),
        (10, [128] * 4, [5, 5]),
        (3, [128] * 4, [3]),
        (6, [2, 2], [2, 2, 2]),
        (9, [2, 4], [2, 2, 2, 2, 1]),
    ],
)
def test_cores_are_spread_over_the_nodes(cores: int, sizes: list[int], shares: list[int]) -> None:
    found: Any = FakeRay(*[{"CPU": float(size), "far": 2.0} for size in sizes])
    cluster = minato_gpu.RayLanes(cores, resources={"far": 2})
    nodes = cluster._start(found)
    assert [workers for _, workers in nodes.values()] == shares
    assert [actor.options["num_cpus"] for actor in found.actors] == shares
    for actor in found.actors:
        assert actor.options["scheduling_strategy"] == "SPREAD"
        assert actor.options["resources"] == {"far": 1e-3}, "other ranks have room beside it"


def test_actors_end_with_the_object_that_named_them() -> None:
    found: Any = FakeRay({"CPU": 2}, {"CPU": 2})
    cluster = minato_gpu.RayLanes(4)
    nodes = cluster._start(found)
    assert found.killed == []
    del cluster
    assert len(nodes) == 2 and found.killed == found.actors


def test_actors_that_cannot_begin_are_ended() -> None:
    found: Any = FakeRay({"CPU": 2}, {"CPU": 2})
    found.fails = True
    cluster = minato_gpu.RayLanes(4)
    with pytest.raises(wire.AgentError, match="did not start"):
        cluster._start(found)
    assert len(found.killed) == 2


def test_an_agent_that_is_lost_is_asked_for_its_new_address() -> None:
    found: Any = FakeRay()
    actor = Actor({})
    actor.addresses = ["node:1", "node:2"]
    agent = ray_lanes._Agent(found, actor)
    assert [agent.find(), agent.find()] == ["node:1", "node:2"]


def test_ray_that_is_shut_down_is_asked_nothing() -> None:
    """Asked, it would begin a cluster of this machine."""
    found: Any = FakeRay()
    agent = ray_lanes._Agent(found, Actor({}))
    found.is_up = False
    found.wait = found.get = found.nodes = None
    with pytest.raises(wire.AgentError, match="shutdown"):
        agent.find()
