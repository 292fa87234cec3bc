"""Workers that die are replaced, and nothing is lost: what they were at is prepared by others, with the same draws."""

from __future__ import annotations

import multiprocessing
import multiprocessing.reduction
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.observe.event_log import EventLog
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling import replay
from minato_gpu.scheduling.policy import Policy
from tests.contracts.datasets import Costly, Made, Streams, rows
from tests.contracts.deadly import DEATHS, FORK, SAMPLES, Deadly, check_all, deadly_loader
from tests.contracts.modes import BOUNDED_8
from tests.support.leaks import no_child_stays
from tests.support.raising import error_of
from tests.support.waiting import wait_until


@pytest.mark.parametrize("how", DEATHS)
def test_a_death_loses_nothing(how: str) -> None:
    loader = deadly_loader(Deadly(17, 1, how))
    check_all(rows(loader))
    assert loader.stats()["workers"] == {"died": 1, "hung": 0, "replaced": 1}
    assert loader.stats()["samples_repeated"] >= 1 and loader.stats()["samples_failed"] == 0


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 3, "prefetch_factor": 4},
        {"collate_fn": torch.utils.data.default_collate},
        {"batch_sampler": [[0, 1], list(range(2, 60))], "batch_size": 1, "shuffle": False},
    ],
    ids=lambda more: ", ".join(more) or "plain",
)
def test_out_of_order(more: dict[str, Any]) -> None:
    if "batch_sampler" in more:
        loader = BOUNDED_8.loader(
            Deadly(17, 1),
            batch_sampler=more["batch_sampler"],
            num_workers=2,
            on_worker_death="replace",
            generator=torch.Generator().manual_seed(5),
        )
        assert sorted(row[0] for row in rows(loader)) == list(range(SAMPLES))
    else:
        check_all(rows(deadly_loader(Deadly(17, 1), BOUNDED_8, **more)), BOUNDED_8)


def test_a_death_that_is_an_error_is_counted() -> None:
    loader = DataLoader(Made(8, lambda index: os._exit(3)), 2, num_workers=1)
    assert "exit code 3" in str(error_of(RuntimeError, list, loader))
    assert loader.stats()["workers"] == {"died": 1, "hung": 0, "replaced": 0}


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.on_request), "forkserver"])
def test_other_start_methods(method: str) -> None:
    """The context given starts the replacement."""
    context = multiprocessing.get_context(method)
    loader = deadly_loader(Deadly(17, 1, context=context), multiprocessing_context=method, num_workers=1)
    check_all(rows(loader))
    assert loader.stats()["workers"]["died"] == 1


def test_a_loader_made_in_a_thread() -> None:
    """The thread that starts the workers ends; the replacement lives on."""
    made: list[Any] = []

    def make() -> None:
        loader = deadly_loader(Deadly(50, 1))
        made.extend((loader, iter(loader)))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    check_all(rows(made[1]))


def _ragged(key: int) -> Any:
    return torch.full((key % 5 + 1, 40_000), key)


def test_what_the_dead_had_laid_down_stays_as_it_was() -> None:
    """Samples that travel as objects lie in the worker's own memory, which its replacement goes on with."""
    left = FORK.Value("i", 4, lock=False)

    def make(key: int) -> Any:
        if key % 20 == 19 and left.value * 20 > 100 - key:
            left.value -= 1
            os.kill(os.getpid(), signal.SIGKILL)
        return _ragged(key)

    loader = DataLoader(Made(100, make), 2, num_workers=2, collate_fn=list, on_worker_death="replace")
    kept = list(loader)
    assert [int(sample[0, 0]) for batch in kept for sample in batch] == list(range(100))
    assert all(torch.equal(sample, _ragged(int(sample[0, 0]))) for batch in kept for sample in batch)
    assert loader.stats()["workers"]["died"] == 4


def test_any_number_of_deaths_from_outside() -> None:
    """Killed at any moment, at samples that cost next to nothing and travel by the hundred."""
    rng = random.Random(3)
    loader = deadly_loader(Costly(1200), num_workers=2, persistent_workers=True)
    deaths = 0
    for _ in range(2):
        received: list[int] = []
        for number, batch in enumerate(loader):
            received += batch.tolist()
            if number % 25 == 12:
                lane = loader._session.engine.pump.lanes["cpu"]
                pid = rng.choice(lane.pids)
                os.kill(pid, signal.SIGKILL)
                deaths += 1
                assert wait_until(lambda lane=lane, pid=pid: pid not in lane.pids)  # type: ignore[misc]
        assert sorted(received) == list(range(1200))
    assert deaths > 20


def test_a_worker_with_nothing_to_do_is_replaced_while_the_consumer_is_away() -> None:
    iterator = iter(deadly_loader(Costly(8), prefetch_factor=4))
    assert len(next(iterator)) == 4
    lane = iterator._engine.pump.lanes["cpu"]
    assert wait_until(lambda: not lane.at_work())
    pid = lane.pids[1]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: lane.pids[1] != pid)
    assert len(next(iterator)) == 4


def test_a_death_before_the_first_epoch_is_no_part_of_the_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.jsonl", Policy(window=4))
    log(m.Lost(1.0, "cpu"), [])
    log.begin()
    log(m.LaneOpened(2.0, "cpu", 1), [])
    log.close()
    assert replay.verify((tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_the_events_replay(tmp_path: Path) -> None:
    loader = deadly_loader(Deadly(17, 2), on_error="skip")
    loader.record_events(tmp_path / "log.jsonl")
    assert len(rows(loader)) == SAMPLES - 1
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert sum('"Lost"' in line for line in lines) == 2
    assert replay.verify(lines) == len(lines) - 1


def test_start_functions_that_kill_end_the_loader() -> None:
    loader = deadly_loader(Costly(40), worker_init_fn=lambda worker: os._exit(1))
    with no_child_stays():
        assert "3 workers in a row ended before they had taken any work" in str(error_of(RuntimeError, list, loader))


def test_a_stream_dies_with_its_worker() -> None:
    with pytest.raises(ValueError, match="an IterableDataset's stream dies with its worker"):
        DataLoader(Streams([3]), num_workers=1, on_worker_death="replace")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_worker_death": "ignore"}, "on_worker_death must be 'raise' or 'replace'"),
        ({"on_worker_death": "replace", "num_workers": 0}, "needs num_workers > 0"),
        ({"hang_timeout": 0}, "hang_timeout must be a positive number of seconds"),
        ({"hang_timeout": float("nan")}, "hang_timeout must be a positive number of seconds"),
        ({"hang_timeout": 1.0, "num_workers": 0}, "needs num_workers > 0"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoader(Costly(4), **{"num_workers": 1, **arguments})
