"""A lane behind a socket: the contract, and a loader with one worker here and two there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from itertools import islice
from time import sleep
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from minato_gpu import DataLoader
from tests.lanes.contract import LaneContract, Made, Trace
from tests.lanes.harness import job, open_links, piece, task
from tests.lanes.socket_lane import AgentProcess, SocketLane, SocketLanes

AHEAD_S = 1000.0  # of the agent's clock


class TestBehindASocket(LaneContract):
    @contextmanager
    def made(self, trace: Trace) -> Iterator[Made]:
        agent = AgentProcess(AHEAD_S, job(trace.make, repeats=True))
        with open_links() as links:
            lane = SocketLane(agent.address, 1, None, links)
            try:
                yield Made(lane, lambda keys, chunk, run: task(piece(keys), chunk=chunk)._replace(run=run))
            finally:
                lane.close(20.0)
                agent.close()


class Drawn:
    """Samples of their key and of what they draw, in rows or of a length of their own; ``fails_among``: those do that a
    worker prepares who is one of so many. ``slow_here``: a worker that is alone takes 5 ms for each."""

    slow_here = False

    def __init__(self, *, rows: bool = True, fails_among: int = 0) -> None:
        self.rows, self.fails_among = rows, fails_among

    def __len__(self) -> int:
        return 240

    def __getitem__(self, key: int) -> Any:
        info: Any = get_worker_info()
        if info.num_workers == self.fails_among:
            raise ValueError("a bad sample")
        if self.slow_here and info.num_workers == 1:
            sleep(5e-3)
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


def made(*, slots: int = 0, agents: Any = (), dataset: Any = None, **more: Any) -> Any:
    """A loader with one worker here, and those of the agents."""
    arguments: dict[str, Any] = {"batch_size": 8, "num_workers": 1, "shuffle": True, "timeout": 60, **more}
    samples: Any = copy(dataset or Drawn())
    samples.slow_here = bool(agents)  # or all is done before the workers of an agent have begun
    loader: Any = DataLoader(samples, generator=torch.Generator().manual_seed(3), **arguments)
    session = loader._session
    if agents:
        session.options = replace(session.options, more_lanes=(SocketLanes([each.address for each in agents], slots),))
    return loader


def bits(value: Any) -> Any:
    """Something that is equal where every bit is."""
    if isinstance(value, dict):
        return tuple((key, bits(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(bits, value))
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


def samples_of(batches: list[Any]) -> list[Any]:
    """The samples of batches of rows, sorted."""
    return sorted(
        (int(key), values.numpy().tobytes(), name)
        for batch in batches
        for key, values, name in zip(batch["key"], batch["values"], batch["name"], strict=True)
    )


@contextmanager
def agents(count: int = 1) -> Iterator[list[AgentProcess]]:
    """Agents that no lane may be left of."""
    found = [AgentProcess(AHEAD_S) for _ in range(count)]
    try:
        yield found
    finally:
        for each in found:
            each.close()


def there(loader: Any) -> int:
    """How many samples the other lanes have prepared."""
    return sum(lane["samples"] for name, lane in loader.stats()["lanes"].items() if name != "cpu")


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_batches_are_the_same_bits_in_the_same_order(mode: dict[str, Any]) -> None:
    expected = [bits(batch) for batch in made(**mode)]
    with agents() as others:
        loader = made(slots=2, agents=others, **mode)
        assert [bits(batch) for batch in loader] == expected
        assert there(loader) > 0
        if budget := mode.get("host_memory_budget"):
            # a sample for each slot, or where workers join them a batch, and the one that is due
            beyond = 3 * 8200 if loader.collate_fn is not joined else 4 * 8 * 1000
            assert loader.stats()["bytes_in_flight_peak"] <= 1.05 * (budget + beyond)
        del loader


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("count", [1, 2])
def test_out_of_order_they_are_the_same_samples(count: int) -> None:
    expected = samples_of(list(made()))
    with agents(count) as others:
        loader = made(slots=2, agents=others, in_order=False, max_lateness=4)
        assert samples_of(list(loader)) == expected
        assert there(loader) > 0
        del loader


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("mode", [MODES["rows"], MODES["joined"], MODES["budget"]], ids=["rows", "joined", "budget"])
def test_an_agent_that_is_killed_takes_no_sample_along(mode: dict[str, Any]) -> None:
    expected = [bits(batch) for batch in made(**mode)]
    with agents() as others:
        loader = made(slots=2, agents=others, **mode)
        found = []
        for batch in loader:
            found.append(bits(batch))
            if len(found) >= 8 and there(loader) > 0:
                others[0].kill()
        assert found == expected
        assert 0 < there(loader) < 240
        del loader


def epochs_of(loader: Any) -> list[Any]:
    """The batches of an epoch, of the next up to where it is left, and of a third."""
    return [[bits(batch) for batch in islice(loader, stop)] for stop in (None, 3, None)]


@pytest.mark.usefixtures("no_leaks")
def test_what_an_epoch_that_is_left_has_sent_disturbs_no_other() -> None:
    expected = epochs_of(made(persistent_workers=True))
    with agents() as others:
        loader = made(slots=2, agents=others, persistent_workers=True)
        assert epochs_of(loader) == expected
        del loader


@pytest.mark.usefixtures("no_leaks")
def test_a_failure_says_in_which_lane_it_happened() -> None:
    with agents() as others:
        lane = f"cpu:{others[0].address[0]}:{others[0].address[1]}"
        loader = made(slots=2, agents=others, dataset=Drawn(fails_among=2), on_error="skip")
        list(loader)
        assert {failure["lane"] for failure in loader.stats()["failures"]} == {lane}
        del loader
