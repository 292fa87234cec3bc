"""A sample that kills one worker after another is a bad sample, and is named; nothing else is lost."""

from __future__ import annotations

import multiprocessing
import multiprocessing.reduction
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from minato_gpu import DataLoader, Field, Pipeline, Stage
from minato_gpu.engine.engine import Engine
from minato_gpu.engine.handover import Handover
from minato_gpu.scheduling import messages as m
from tests.contracts.datasets import Costly, Made, rows
from tests.contracts.deadly import FORK, SAMPLES, Deadly, deadly_loader, undisturbed
from tests.contracts.modes import BOUNDED_8, IN_ORDER, Mode
from tests.support.raising import error_of
from tests.support.waiting import wait_until


@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_a_sample_that_kills_is_a_bad_sample(mode: Mode) -> None:
    told: list[Any] = []

    def skip(bad: Any) -> str:
        told.append(bad)
        return "skip"

    loader = deadly_loader(Deadly(17, 9), mode, on_error=skip)
    expected = [row for row in undisturbed(mode) if row[0] != 17]
    received = rows(loader)
    assert sorted(received) == sorted(expected)
    assert received == expected or mode.lateness
    [bad] = told
    assert (bad.epoch, bad.index, bad.lane, bad.error) == (0, 17, "cpu", "KilledWorkers")
    assert bad.position is not None and "killed by signal: Killed" in bad.traceback
    assert loader.stats()["workers"]["died"] == 2 and loader.stats()["samples_failed"] == 1


def test_it_raises_when_its_batch_is_due() -> None:
    order = [row[0] for row in undisturbed()]
    received: list[int] = []

    def consume() -> None:
        for batch in deadly_loader(Deadly(17, 9)):
            received.extend(batch[0].tolist())

    text = str(error_of(RuntimeError, consume))
    assert "epoch 0" in text and "index 17" in text and "2 workers have died at this" in text
    assert received == order[: order.index(17) // 4 * 4]


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
    loader = DataLoader(_leaves(error), 4, num_workers=2, on_worker_death="replace", on_error="skip")
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

    loader = DataLoader(Made(40, make), 4, num_workers=1, on_worker_death="replace", on_error=skip)
    assert len([key for batch in loader for key in batch]) == 39
    assert loader.stats()["workers"]["died"] == 3
    [bad] = told
    assert (bad.index, bad.error) == (17, "KilledWorkers") and "SystemExit" not in bad.traceback


def test_a_start_function_that_leaves_is_told_by_its_name() -> None:
    def leave(worker: int) -> None:
        raise SystemExit("not today")

    text = str(error_of(RuntimeError, list, deadly_loader(Costly(40), worker_init_fn=leave)))
    assert "SystemExit: not today" in text and "ended before they had taken any work" in text


def _outcomes(loader: Any) -> list[Any]:
    """Its batches, and the names of what it raises in between."""
    iterator, found = iter(loader), list[Any]()
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error).__name__)


def test_the_consumer_goes_on_after_it() -> None:
    """As after any bad sample: the loader is not at its end."""

    def make(key: int) -> int:
        if key == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if key == 21:
            raise ValueError("broken")
        return key

    loader = DataLoader(Made(40, make), 4, num_workers=2, collate_fn=list, on_worker_death="replace")
    batches: list[Any] = [list(range(first, first + 4)) for first in range(0, 40, 4)]
    batches[1], batches[5] = "KilledWorkers", "ValueError"
    assert _outcomes(loader) == batches
    stats = loader.stats()
    assert (stats["samples_delivered"], stats["samples_failed"], stats["samples_skipped"]) == (32, 2, 6)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("in_order", [True, False], ids=["in order", "bounded"])
def test_among_samples_that_only_one_worker_can_join(on_error: str, in_order: bool) -> None:
    """The one that kills is to blame, not its batch; 32 and 33 are all of one."""

    def make(key: int) -> Any:
        if key in (17, 32, 33):
            os.kill(os.getpid(), signal.SIGKILL)
        return lambda: key

    def collate(samples: list[Any]) -> list[int]:
        return [sample() for sample in samples]

    more: dict[str, Any] = {} if in_order else {"in_order": False, "max_lateness": 40}
    loader = DataLoader(
        Made(40, make), 2, num_workers=2, collate_fn=collate, on_error=on_error, on_worker_death="replace", **more
    )
    outcomes, stats = _outcomes(loader), loader.stats()
    received = sorted(key for batch in outcomes if isinstance(batch, list) for key in batch)
    if on_error == "skip":
        assert received == [key for key in range(40) if key not in (17, 32, 33)]
        assert sorted(failure["index"] for failure in stats["failures"]) == ["17", "32", "33"]
        assert (stats["samples_delivered"], stats["samples_failed"], stats["samples_skipped"]) == (37, 3, 0)
    else:
        assert outcomes.count("KilledWorkers") in ((2,) if in_order else (2, 3))
        assert len(received) == 40 - 2 * outcomes.count("KilledWorkers")


def test_a_worker_dies_while_its_batch_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch has left the window, the consumer has no array of it yet: the memory is not the next worker's."""
    hand_over, started = Handover.value, list[Engine]()

    def late(handover: Handover, *batch: Any) -> Any:
        engine = started[0]
        if not engine.log.workers["replaced"]:
            lane: Any = engine.pump.lanes[m.CPU]
            os.kill(lane.pids[0], signal.SIGKILL)
            assert wait_until(lambda: engine.log.workers["replaced"])
        return hand_over(handover, *batch)

    monkeypatch.setattr(Handover, "value", late)
    loader = DataLoader(
        Made(16, lambda key: np.full(200_000, key, np.uint8)),
        2,
        num_workers=1,
        collate_fn=lambda samples: [torch.from_numpy(sample) for sample in samples],
        on_worker_death="replace",
    )
    iterator = iter(loader)
    started.append(iterator._engine)
    batches = list(iterator)
    assert [[sample.unique().tolist() for sample in batch] for batch in batches] == [
        [[first], [first + 1]] for first in range(0, 16, 2)
    ]
    assert loader.stats()["workers"]["replaced"] == 1


def _heavy(monkeypatch: pytest.MonkeyPatch, weigh: Callable[[], Any]) -> None:
    """Text travels in the worker's report: have ``weigh`` called where a report with the text "heavy" is pickled."""
    from minato_gpu.lanes import leases, wire
    from minato_gpu.lanes.base import Extra, Report

    class Pickler:
        @staticmethod
        def dumps(message: Any) -> Any:
            items = message[:1] if len(message) == 2 else Report(*message).items or ()
            if any(isinstance(item, Extra) and "heavy" in item.objects for item in items):
                weigh()
            return _PICKLER.dumps(message)

    monkeypatch.setattr(wire, "ForkingPickler", Pickler)
    monkeypatch.setattr(leases, "ForkingPickler", Pickler)


def _no_memory() -> None:
    raise MemoryError


_PICKLER: Any = multiprocessing.reduction.ForkingPickler
_WEIGHTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no memory": (_no_memory, "MemoryError"),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "KilledWorkers"),
}


@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize("weight", _WEIGHTS)
def test_a_sample_that_kills_when_it_is_reported(weight: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker after the other: it is found, and the others of its report are not lost."""
    weigh, error = _WEIGHTS[weight]
    _heavy(monkeypatch, weigh)
    dataset = Made(64, lambda key: (torch.tensor(key), "heavy" if key == 49 else "light"))
    loader = DataLoader(dataset, batch, num_workers=1, on_worker_death="replace", on_error="skip", timeout=30)
    assert [key for keys, _ in loader for key in keys.tolist()] == [key for key in range(64) if key != 49]
    stats = loader.stats()
    assert [(one["index"], one["stage"], one["error"]) for one in stats["failures"]] == [("49", "send", error)]
    assert stats["workers"]["died"] <= 4


def test_the_stage_is_named() -> None:
    def deadly(fields: Any, _: Any) -> Any:
        if fields["x"] == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"y": np.float32(fields["x"])}

    one = Field(np.float32, ())
    stages = (
        Stage("first", reads=("x",), writes={"z": one}, cpu=lambda fields, _: {"z": np.float32(1)}),
        Stage("second", reads=("x",), writes={"y": one}, cpu=deadly),
    )
    dataset = Made(12, lambda key: {"x": key})
    pipeline = Pipeline(stages, outputs=("y", "z"))
    loader = DataLoader(dataset, 4, num_workers=2, pipeline=pipeline, on_worker_death="replace", on_error="skip")
    assert [y for batch in loader for y in batch["y"].tolist()] == [*range(7), *range(8, 12)]
    [failure] = loader.stats()["failures"]
    assert (failure["stage"], failure["index"]) == ("second", "7")


class Many(Dataset[Any]):
    """Fetches by the batch; key 17 kills."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, keys: list[int]) -> list[Any]:
        if 17 in keys:
            os.kill(os.getpid(), signal.SIGKILL)
        return [torch.tensor(key) for key in keys]


def test_the_one_of_many_is_found() -> None:
    loader = DataLoader(Many(), 8, num_workers=2, on_worker_death="replace", on_error="skip")
    assert [key for batch in loader for key in batch.tolist()] == [key for key in range(SAMPLES) if key != 17]
    # the first chunk of a worker is asked for one by one anyway, to see whether samples draw
    assert 2 <= loader.stats()["workers"]["died"] <= 3 and loader.stats()["failures"][0]["index"] == "17"


@pytest.mark.parametrize("order", [{}, {"in_order": False}], ids=["in order", "bounded"])
@pytest.mark.parametrize("times", [1, 9])
def test_a_collate_function_that_kills(order: dict[str, Any], times: int) -> None:
    left = FORK.Value("i", times, lock=False)

    def collate(samples: list[int]) -> list[int]:
        if 6 in samples and left.value:
            left.value -= 1
            os.kill(os.getpid(), signal.SIGKILL)
        return samples

    loader = DataLoader(
        Made(16, int), 4, num_workers=2, collate_fn=collate, on_worker_death="replace", on_error="skip", **order
    )
    if times == 1:
        assert sorted(key for batch in loader for key in batch) == list(range(16))
    else:
        assert "collate" in str(error_of(RuntimeError, list, loader))
    assert left.value == max(0, times - 2)


def test_samples_that_only_one_worker_can_join() -> None:
    left = FORK.Value("i", 1, lock=False)

    def make(key: int) -> Any:
        if key == 6 and left.value:
            left.value -= 1
            os.kill(os.getpid(), signal.SIGKILL)
        return lambda: key  # cannot be pickled

    def collate(samples: list[Any]) -> list[int]:
        return [sample() for sample in samples]

    loader = DataLoader(Made(16, make), 4, num_workers=2, collate_fn=collate, in_order=False, on_worker_death="replace")
    assert sorted(key for batch in loader for key in batch) == list(range(16))
