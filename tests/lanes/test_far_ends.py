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
from unittest.mock import MagicMock

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


def test_a_sockets_time_limit_is_for_each_megabyte() -> None:
    """Not for a whole job, which may take longer than any silence that is allowed."""
    end, sent = MagicMock(), list[int]()
    end.sendall.side_effect = lambda data: sent.append(len(data))
    FrameSocket(end).send("job", body=[memoryview(bytes(5 << 20)), memoryview(bytes(100))])
    assert sum(sent[1:]) == (5 << 20) + 100 and max(sent) == 1 << 20


def test_a_socket_is_closed_once_nobody_sends() -> None:
    """Its number may be another file's then."""
    begun, may_end, is_closed = (threading.Event() for _ in range(3))
    end = MagicMock()

    def sends(data: memoryview) -> None:
        begun.set()
        may_end.wait(20.0)

    end.sendall.side_effect, end.close.side_effect = sends, is_closed.set
    sender = FrameSocket(end)
    threads = [threading.Thread(target=sender.send, args=("job",)), threading.Thread(target=sender.close)]
    threads[0].start()
    assert begun.wait(20.0)
    threads[1].start()
    assert not is_closed.wait(0.2)
    may_end.set()
    assert is_closed.wait(20.0)
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


def fake_ray(*sizes: int) -> Any:
    """Ray with nodes of so many cores beside the one of the program."""
    ray, resources = MagicMock(), [{"CPU": float(size), "far": 2.0} for size in (0, *sizes)]
    ray.exceptions.RayError = ZeroDivisionError
    ray.get_runtime_context.return_value.get_node_id.return_value = "0"
    ray.nodes.return_value = [{"NodeID": str(at), "Alive": True, "Resources": r} for at, r in enumerate(resources)]
    ray.wait.side_effect = lambda asked, timeout: (asked[:1], asked[1:])
    return ray


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
    ray = fake_ray(*sizes)
    cluster = minato_gpu.RayLanes(cores, resources={"far": 2})
    assert [workers for _, workers in cluster._start(ray).values()] == shares
    assert ray.remote.call_args.kwargs["scheduling_strategy"] == "SPREAD"
    actors = [each.kwargs for each in ray.remote.return_value.return_value.options.call_args_list]
    assert [actor["num_cpus"] for actor in actors] == shares
    assert all(actor["resources"] == {"far": 1e-3} for actor in actors), "other ranks have room beside it"


def test_actors_end_with_the_object_that_named_them() -> None:
    ray, cluster = fake_ray(2, 2), minato_gpu.RayLanes(4)
    nodes = cluster._start(ray)
    assert ray.kill.call_count == 0
    del cluster
    assert len(nodes) == ray.kill.call_count == 2


def test_actors_that_cannot_begin_are_ended() -> None:
    ray, cluster = fake_ray(2, 2), minato_gpu.RayLanes(4)
    ray.get.side_effect = ZeroDivisionError
    with pytest.raises(wire.AgentError, match="did not start"):
        cluster._start(ray)
    assert ray.kill.call_count == 2


def test_an_agent_that_is_lost_is_asked_for_its_new_address() -> None:
    ray = fake_ray()
    ray.get.side_effect = ["node:1", "node:2"]
    agent = ray_lanes._Agent(ray, MagicMock())
    assert [agent.find(), agent.find()] == ["node:1", "node:2"]


def test_ray_that_is_shut_down_is_asked_nothing() -> None:
    """Asked, it would begin a cluster of this machine."""
    ray = fake_ray()
    agent = ray_lanes._Agent(ray, MagicMock())
    ray.is_initialized.return_value = False
    with pytest.raises(wire.AgentError, match="shutdown"):
        agent.find()
    assert not (ray.wait.called or ray.get.called or ray.nodes.called)
