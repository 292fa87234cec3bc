"""The far lane: the contract, and loaders with one worker here and others at agents."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

import minato_gpu
from minato_gpu import DataLoader, Source, read_bytes
from minato_gpu.lanes.far.agent import Shipment
from minato_gpu.lanes.far.lane import FarLane
from minato_gpu.memory.status_board import ATTENTION, CONSUMER
from minato_gpu.sources.reading import AT_HAND
from tests.lanes.contract import LaneContract, Made, Trace
from tests.lanes.harness import job, marked_task, open_links
from tests.lanes.lanes import FORK
from tests.support.agents import AgentProcess, agents
from tests.support.waiting import wait_until

AHEAD_S = 1000.0  # of the agent's clock
_FOLDER = tempfile.TemporaryDirectory()


class TestFar(LaneContract):
    @contextmanager
    def made(self, trace: Trace) -> Iterator[Made]:
        with agents(1, 1, job=job(trace.make, repeats=True), ahead_s=AHEAD_S) as [agent], open_links() as links:
            links.board.words[ATTENTION] = CONSUMER
            address, shipment = agent.address, Shipment(b"", (), {}, 1 << 30, 1, agent.lane)
            lane = FarLane(lambda: address, shipment, links)
            assert wait_until(lambda: lane.stats()["connected"])  # it has no slots before
            try:
                yield Made(lane, links, partial(marked_task, links))
            finally:
                lane.close(20.0)


class Drawn:
    """Samples of their key and of what they draw, in rows or of a length of their own; ``fails_among``: those do that a
    worker prepares who is one of so many.

    ``begun``: a file that agents' workers make. A worker that is alone waits for it, and takes 5 ms for each sample:
    else all may be done before an agent's workers have begun. ``slow_here``: it takes these 5 ms without waiting."""

    begun: Path | None = None
    slow_here = False

    def __init__(self, *, rows: bool = True, fails_among: int = 0) -> None:
        self.rows, self.fails_among = rows, fails_among
        self.weights = np.ones(1 << 17)  # what is large is pickled otherwise

    def __len__(self) -> int:
        return 240

    def __getitem__(self, key: int) -> Any:
        info: Any = get_worker_info()
        is_here = info.num_workers == 1
        if self.begun is not None and not is_here:
            self.begun.touch()
        elif self.begun is not None:
            wait_until(self.begun.exists, 20.0)
        if is_here and (self.begun is not None or self.slow_here):
            sleep(5e-3)
        if info.num_workers == self.fails_among:
            raise ValueError("a bad sample")
        values = torch.rand(2000 if self.rows else 1 + key % 7)
        return {"key": key, "values": values, "name": f"sample {key}"}


def joined(samples: list[Any]) -> Any:
    """A batch of samples of several lengths."""
    return [sample["key"] for sample in samples], torch.cat([sample["values"] for sample in samples])


MODES: dict[str, dict[str, Any]] = {
    "rows": {},
    "joined": {"dataset": Drawn(rows=False), "collate_fn": joined},
    "items": {"batch_size": None},
    "budget": {"host_memory_budget": 100_000},
    "a small budget, joined": {"dataset": Drawn(rows=False), "collate_fn": joined, "host_memory_budget": 4096},
}


def made(*, agents: Any = (), dataset: Any = None, awaits: bool = True, slow_here: bool = False, **more: Any) -> Any:
    """A loader with one worker here, and those of the agents, for whose first sample that one ``awaits``."""
    arguments: dict[str, Any] = {"batch_size": 8, "num_workers": 1, "shuffle": True, "timeout": 60, **more}
    if agents:
        arguments["cluster"] = minato_gpu.Lanes(*[each.address for each in agents])
    samples: Any = copy(dataset or Drawn())
    samples.slow_here = slow_here
    samples.begun = Path(tempfile.mkdtemp(dir=_FOLDER.name), "begun") if agents and awaits else None
    return DataLoader(samples, generator=torch.Generator().manual_seed(3), **arguments)


def bits(value: Any) -> Any:
    """Something that is equal where every bit is."""
    if isinstance(value, dict):
        return tuple((key, bits(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(bits, value))
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


def there(loader: Any, agent: AgentProcess | None = None) -> int:
    """How many samples an agent, or all of them, have prepared."""
    lanes = loader.stats()["lanes"].items()
    return sum(lane["samples"] for name, lane in lanes if name != "cpu" and (agent is None or name == agent.lane))


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(("mode", "beyond"), [("budget", 3 * 8200), ("a small budget, joined", 4 * 8 * 1000)])
def test_what_is_prepared_elsewhere_keeps_to_the_budget(mode: str, beyond: int) -> None:
    """``beyond``: a sample for each slot, or where workers join them a batch, and the one that is due."""
    expected = [bits(batch) for batch in made(**MODES[mode])]
    with agents() as others:
        loader = made(agents=others, **MODES[mode])
        assert [bits(batch) for batch in loader] == expected
        assert there(loader) > 0
        assert loader.stats()["bytes_in_flight_peak"] <= 1.05 * (MODES[mode]["host_memory_budget"] + beyond)
        del loader


def kill_session(agent: AgentProcess) -> None:
    [session] = agent.sessions()
    session.kill()


HARMS: dict[str, Callable[[AgentProcess], None]] = {
    "killed": AgentProcess.kill,
    "session": kill_session,
    "stopped": lambda agent: agent.signal_all(signal.SIGSTOP),
}


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(("mode", "harm"), [("rows", "stopped"), ("joined", "killed"), ("budget", "session")])
def test_an_agent_that_is_lost_takes_no_sample_along(mode: str, harm: str) -> None:
    expected = [bits(batch) for batch in made(**MODES[mode])]
    with agents(2) as others:
        loader, found, harmed = made(agents=others, **MODES[mode]), [], None
        for batch in loader:
            found.append(bits(batch))
            if harmed is None and (at_work := [each for each in others if there(loader, each) > 0]):
                harmed = at_work[0]
                HARMS[harm](harmed)
        assert found == expected
        assert harmed is not None and there(loader, harmed) < 240
        assert loader.stats()["failures"] == [] and loader.stats()["workers"]["died"] == 0
        del loader


@pytest.mark.usefixtures("no_leaks")
def test_a_node_that_comes_back_is_given_work_again() -> None:
    with agents(1) as [other]:
        loader = made(agents=[other], persistent_workers=True)
        expected = [bits(batch) for batch in loader]
        kill_session(other)
        epochs = [[bits(batch) for batch in loader]]  # while nobody is there, or until it is there again
        before = there(loader)
        assert wait_until(lambda: len(other.sessions()) == 1 and before >= 0)
        while loader.stats()["lanes"][other.lane]["samples"] == 0 and len(epochs) < 20:
            epochs.append([bits(batch) for batch in loader])
        assert len(expected) == 30 and all(len(epoch) == 30 for epoch in epochs)
        assert there(loader) > 0 and loader.stats()["nodes"][other.lane]["lost"] == 1
        del loader


@pytest.mark.usefixtures("no_leaks", "secret")
def test_an_agent_that_starts_later_is_given_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    loader = made(agents=[SimpleNamespace(address=f"127.0.0.1:{port}")], awaits=False, persistent_workers=True)
    assert len(list(loader)) == 30 and there(loader) == 0
    other = AgentProcess(2, port=port)
    try:
        while there(loader) == 0:  # for ever, where nobody is asked again
            assert len(list(loader)) == 30
        del loader
    finally:
        other.close()


class Filed(Drawn):
    """Samples with some bytes of this file, and how many a worker has read that were not at hand."""

    def source(self, key: int) -> Source:
        return Source(__file__, 10 * key, 10)

    def __getitem__(self, key: int) -> Any:
        sample = super().__getitem__(key)
        sample["bytes"] = torch.from_numpy(read_bytes(self.source(key)))
        info: Any = get_worker_info()
        sample["direct"] = AT_HAND.direct * (info.num_workers == 2)
        return sample


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("mode", [{}, {"in_order": False, "max_lateness": 4}], ids=["in order", "out of order"])
def test_sources_are_read_by_a_reader_where_they_are_prepared(mode: dict[str, Any]) -> None:
    with agents() as others:
        loader = made(agents=others, dataset=Filed(), **mode)
        batches = list(loader)
        assert there(loader) > 0 and not any(batch["direct"].any() for batch in batches)
        assert "reads" not in loader.stats(), "nor do they wait for one here"
        del loader
    data = Path(__file__).read_bytes()
    found = {int(key): bytes(part) for b in batches for key, part in zip(b["key"], b["bytes"].numpy(), strict=True)}
    assert found == {key: data[10 * key : 10 * key + 10] for key in range(240)}


def test_all_ends_with_the_program_however_that_ends() -> None:
    with agents(1) as [other]:
        before = psutil.Process(other.pid).children(recursive=True)
        program = FORK.Process(target=_train, args=([other],))
        program.start()
        assert wait_until(lambda: len(psutil.Process(other.pid).children(recursive=True)) >= len(before) + 3)
        program.kill()
        program.join()
        assert wait_until(lambda: psutil.Process(other.pid).children() == [])
        program.close()


PROGRAM = """
import sys

import minato_gpu


class Squares:
    def __len__(self):
        return 64

    def __getitem__(self, key):
        return key * key


if __name__ == "__main__":
    cluster = minato_gpu.Lanes(sys.argv[1])
    loader = minato_gpu.DataLoader(Squares(), 8, num_workers=1, cluster=cluster, persistent_workers=True)
    there = 0
    while not there:
        assert [int(each) for batch in loader for each in batch] == [key * key for key in range(64)]
        there = loader.stats()["lanes"][f"cpu:{sys.argv[1]}"]["samples"]
"""


def test_a_data_set_of_the_programs_own_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    with agents() as [other]:
        command = [sys.executable, str(tmp_path / "train.py"), other.address]
        environment = {**os.environ, "PYTHONPATH": str(Path(minato_gpu.__file__).parents[1])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr


def _train(others: list[AgentProcess]) -> None:
    for _ in made(agents=others):
        sleep(60.0)


@pytest.mark.usefixtures("no_leaks")
def test_a_failure_says_in_which_lane_it_happened() -> None:
    with agents() as others:
        loader = made(agents=others, dataset=Drawn(fails_among=2), on_error="skip")
        list(loader)
        assert {failure["lane"] for failure in loader.stats()["failures"]} == {others[0].lane}
        del loader
