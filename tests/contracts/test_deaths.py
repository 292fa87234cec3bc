"""Workers that die are replaced, and nothing is lost; what kills one after another is a bad sample, and is named. That
the rest comes with the same draws in every mode is in the table (``cases.py``)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from tests.contracts.datasets import Costly, Deadly, Made
from tests.support.leaks import no_child_stays
from tests.support.raising import error_of
from tests.support.waiting import wait_until

FORK = multiprocessing.get_context("fork")


def _loader(dataset: Any, **more: Any) -> Any:
    return DataLoader(dataset, 4, **{"num_workers": 2, "on_worker_death": "replace", **more})


class _Own(BaseException):
    """Like ``SystemExit``, no error that anybody handles who handles errors."""


_ENDS: dict[str, BaseException] = {
    "SystemExit": SystemExit("out of here"),
    "KeyboardInterrupt": KeyboardInterrupt("out of here"),
    "_Own": _Own("out of here"),
    "BaseExceptionGroup": BaseExceptionGroup("several", [_Own("out of here")]),
}


def _leaves(error: str) -> Made:
    def leaves_at_17(key: int) -> Any:
        if key == 17:
            raise _ENDS[error]
        return torch.tensor(key)

    return Made(40, leaves_at_17)


@pytest.mark.parametrize("error", _ENDS)
def test_an_exception_that_ends_workers_is_told_by_its_name(error: str) -> None:
    loader = _loader(_leaves(error), on_error="skip")
    assert [key for batch in loader for key in batch.tolist()] == [key for key in range(40) if key != 17]
    [bad] = loader.stats()["failures"]
    assert (bad["index"], bad["error"]) == ("17", error)
    assert "out of here" in bad["traceback"] and "leaves_at_17" in bad["traceback"]


@pytest.mark.parametrize("more", [{}, {"on_error": "skip"}, {"on_worker_death": "replace"}], ids=str)
def test_an_exception_that_ends_workers_is_told_by_the_error(more: dict[str, Any]) -> None:
    text = str(error_of(RuntimeError, list, DataLoader(_leaves("_Own"), 4, num_workers=2, **more)))
    assert "was ended by _Own" in text and "out of here" in text and "leaves_at_17" in text


def test_what_ended_one_worker_is_not_said_of_the_next() -> None:
    """The second is killed, at another sample."""
    told: list[Any] = []
    times = FORK.Value("i", 1, lock=False)

    def make(key: int) -> Any:
        if key == 5 and times.value:
            times.value = 0
            raise SystemExit("once")
        if key == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(key)

    def skip(bad: Any) -> str:
        told.append(bad)
        return "skip"

    loader = _loader(Made(40, make), num_workers=1, on_error=skip)
    assert len([key for batch in loader for key in batch]) == 39
    assert loader.stats()["workers"]["died"] == 3
    [bad] = told
    assert (bad.index, bad.error) == (17, "KilledWorkers") and "SystemExit" not in bad.traceback


@pytest.mark.parametrize("order", [{}, {"in_order": False}], ids=["in order", "bounded"])
@pytest.mark.parametrize("times", [1, 9])
def test_a_collate_function_that_kills(order: dict[str, Any], times: int) -> None:
    """It works in place, and does not see what the dead have left."""
    left = FORK.Value("i", times, lock=False)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        keys = [int(sample[0]) for sample in samples]
        for sample in samples:
            sample += 1
        if 6 in keys and left.value:
            left.value -= 1
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.stack(samples)

    data = Made(16, lambda key: torch.full((20_000,), key))
    loader = _loader(data, collate_fn=collate, on_error="skip", **order)
    if times == 1:
        assert sorted(int(sample[0]) for batch in loader for sample in batch) == list(range(1, 17))
        assert loader.stats()["samples_repeated"] >= 4
    else:
        assert "collate" in str(error_of(RuntimeError, list, loader))
    assert left.value == max(0, times - 2)


def test_a_loader_made_in_a_thread() -> None:
    """The thread that starts the workers ends; the replacement lives on."""
    made: list[Any] = []

    def make() -> None:
        loader = _loader(Made(40, Deadly(38)))
        made.extend((loader, iter(loader)))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert [key for batch in made[1] for key in batch.tolist()] == list(range(40))


def test_a_worker_with_nothing_to_do_is_replaced_while_the_consumer_is_away() -> None:
    iterator = iter(_loader(Costly(8), prefetch_factor=4))
    assert len(next(iterator)) == 4
    lane = iterator._engine.pump.lanes["cpu"]
    assert wait_until(lambda: not lane.at_work())
    pid = lane.pids[1]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: lane.pids[1] != pid)
    assert len(next(iterator)) == 4


def test_the_process_that_forks_replacements_is_killed() -> None:
    with no_child_stays():
        iterator = iter(_loader(Costly(400)))
        next(iterator)
        lane = iterator._engine.pump.lanes["cpu"]
        for pid in (lane._pool._spawner._process.pid, lane.pids[0]):
            os.kill(pid, signal.SIGKILL)
        text = str(error_of(RuntimeError, list, iterator))
        assert "could not be replaced: the process that starts replacements has been killed" in text
