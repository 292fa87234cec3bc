"""Who may be an agent, and what a loader says at its construction where none can do its work."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader, Lanes, Source
from minato_gpu.lanes.far import wire
from minato_gpu.lanes.far.wire import _LENGTHS
from minato_gpu.sources import cluster_token
from tests.lanes.test_far_ends import pair
from tests.support.agents import AgentProcess, agents
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("secret")

SAMPLES: Any = list(range(8))


@contextmanager
def port(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens, and answers so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            end, _ = listener.accept()
            with end:
                answer(end)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(20.0)


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with agents(1, 1) as [found]:
        yield found


def connected(agent: AgentProcess) -> socket.socket:
    host, port = agent.address.split(":")
    return socket.create_connection((host, int(port)), timeout=10.0)


def refused(address: str, **more: Any) -> str:
    """What is said of the agent there."""
    with pytest.raises(wire.AgentError) as caught:
        DataLoader(SAMPLES, num_workers=1, cluster=Lanes(address), **more)
    return str(caught.value)


# --- who may be an agent ----------------------------------------------------------------------------------


def test_another_token(agent: AgentProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cluster_token.TOKEN, "another one")
    assert f"{agent.address} does not know this MINATO_GPU_TOKEN" in refused(agent.address)


def test_no_token(agent: AgentProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cluster_token.TOKEN)
    with pytest.raises(ValueError, match="MINATO_GPU_TOKEN is not set"):
        DataLoader(SAMPLES, num_workers=1, cluster=Lanes(agent.address))


@pytest.mark.parametrize("name", ["version", "python"])
def test_another_version(agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    theirs, own = wire.own_hello(), wire.own_hello() | {name: "0.0"}
    monkeypatch.setattr(wire, "own_hello", lambda **more: own)
    said = refused(agent.address)
    for hello in (theirs, own):
        assert f"minato_gpu {hello['version']} on Python {hello['python']}" in said


def test_a_port_that_says_something_else() -> None:
    with port(lambda end: end.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: it is no agent\r\n\r\n")) as address:
        assert "is no agent of minato_gpu" in refused(address)


def test_a_port_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LIMIT_S", 0.2)
    with port(lambda end: (end.recv(1), None)[1]) as address:
        assert "answers nothing that an agent says" in refused(address)


def test_who_does_not_know_the_token_is_answered_nothing(agent: AgentProcess) -> None:
    """Not with its own words either: each side's code is of its own."""
    for noise in (bytes(64), b"GET / HTTP/1.1\r\n" * 8, pickle.dumps(print) * 8):
        with connected(agent) as end:
            end.recv(48, socket.MSG_WAITALL)
            end.sendall(noise[:64])
            assert not any(end.recv(32, socket.MSG_WAITALL)) and end.recv(1) == b""
    assert DataLoader(SAMPLES, num_workers=1, cluster=Lanes(agent.address))


def test_an_agents_own_code_opens_no_other_session(agent: AgentProcess) -> None:
    with connected(agent) as end:
        nonces = end.recv(48, socket.MSG_WAITALL)[16:] * 2
        end.sendall(nonces[32:] + cluster_token.code(b"agent", nonces))
        assert not any(end.recv(32, socket.MSG_WAITALL))


def test_no_frame_is_longer_than_its_bound() -> None:
    with pair() as (here, there):
        there.end.sendall(_LENGTHS.pack(1 << 40, 0))
        with pytest.raises(ConnectionError, match="no frame of ours is so long"):
            here.receive()


# --- what is refused at construction ----------------------------------------------------------------------


class Held:
    """A data set that cannot be sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: int) -> int:
        return key


class OwnFile(Held):
    """One that says where its samples' bytes lie."""

    def source(self, key: int) -> Source:
        return Source(__file__)


class Counted(IterableDataset[int]):
    """A stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"dataset": Held()}, TypeError, "dataset cannot be sent .*cannot pickle '_thread.lock' object"),
        ({"collate_fn": lambda samples: samples}, TypeError, "collate_fn cannot be sent to other machines"),
        ({"worker_init_fn": lambda worker: None}, TypeError, "worker_init_fn cannot be sent"),
        ({"num_workers": 0}, ValueError, "needs num_workers > 0"),
        ({"worker_kind": "thread"}, ValueError, "worker_kind='process'"),
        ({"share": "set", "dataset": OwnFile()}, ValueError, "leave out share, or cluster"),
        ({"cache": "1MB", "dataset": OwnFile()}, ValueError, "leave out cache, or cluster"),
        ({"lanes": ("device",)}, ValueError, "lanes"),
        ({"dataset": Counted()}, ValueError, "needs a map-style data set"),
        ({"cluster": "node1:7400"}, TypeError, "cluster must be minato_gpu.Lanes, minato_gpu.RayLanes or None"),
    ],
)
def test_what_cannot_go_to_other_machines(
    agent: AgentProcess, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    given: dict[str, Any] = {"dataset": SAMPLES, "num_workers": 1, "cluster": Lanes(agent.address), **arguments}
    with pytest.raises(error, match=said):
        DataLoader(**given)


@pytest.mark.parametrize("address", ["node1", ":7400", "node1:port", "node1:0", "node1:70000"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ValueError, match="must be a host and a port"):
        Lanes(address)


@pytest.mark.parametrize(
    ("budget", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError), ("many", ValueError)]
)
def test_a_budget_that_is_none(budget: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="node_budget"):
        Lanes("node1:7400", node_budget=budget)


def test_what_an_agent_cannot_load_ends_the_loader_with_the_reason(
    agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Held, "__reduce__", lambda self: (exec, ("raise ImportError('no module of this name here')",)))
    held: Any = Held()
    loader: Any = DataLoader(held, num_workers=1, cluster=Lanes(agent.address), persistent_workers=True)
    with pytest.raises(RuntimeError, match=f"the cpu:{agent.address} lane .*no module of this name here"):
        wait_until(lambda: not list(loader))
