"""Workers that die are replaced, and nothing is lost: what they were at is prepared by others, with the same draws."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.reduction
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset

from minato_gpu import DataLoader, Field, Pipeline, Stage
from minato_gpu.engine import deaths
from minato_gpu.engine.engine import Engine
from minato_gpu.engine.handover import Handover
from minato_gpu.observe.event_log import EventLog
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling import replay
from minato_gpu.scheduling.policy import Policy
from tests.contracts.datasets import Costly, Made, Streams, draw, rows
from tests.contracts.modes import BOUNDED_8, IN_ORDER, Mode
from tests.leaks import child_pids
from tests.raising import error_of
from tests.waiting import wait_until

_FORK = multiprocessing.get_context("fork")
_SAMPLES = 60

DEATHS: dict[str, Callable[[], Any]] = {
    "_exit": lambda: os._exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "segmentation fault": lambda: ctypes.string_at(0),
    "no memory behind shared memory": lambda: os.kill(os.getpid(), signal.SIGBUS),
}


class Deadly(Dataset[Any]):
    """The sample of key ``at`` kills its worker the first ``times`` times, by ``how``; samples are ``draw(key)``."""

    def __init__(self, at: int, times: int, how: str = "SIGKILL", context: Any = _FORK) -> None:
        self.at = at
        self.how = how
        self.left = context.Value("i", times, lock=False)

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, key: int) -> Any:
        if key == self.at and self.left.value:
            self.left.value -= 1
            DEATHS[self.how]()
        assert sum(range(2000)) > 0
        return draw(key)


def _loader(dataset: Any, mode: Mode = IN_ORDER, **more: Any) -> Any:
    arguments: dict[str, Any] = {"num_workers": 2, "on_worker_death": "replace", **more}
    seed = torch.Generator().manual_seed(5)
    return mode.loader(dataset, 4, generator=seed, shuffle=True, **arguments)


def _undisturbed(mode: Mode = IN_ORDER) -> list[Any]:
    return rows(_loader(Deadly(-1, 0), mode))


def _check(received: list[Any], mode: Mode = IN_ORDER) -> None:
    """Every sample once, with the draws that it has in a run in which nobody dies; in order where that is strict."""
    expected = _undisturbed(mode)
    if mode.lateness:
        received, expected = sorted(received), sorted(expected)
    assert received == expected


@pytest.mark.parametrize("how", DEATHS)
def test_a_death_loses_nothing(how: str) -> None:
    loader = _loader(Deadly(17, 1, how))
    _check(rows(loader))
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
        assert sorted(row[0] for row in rows(loader)) == list(range(_SAMPLES))
    else:
        _check(rows(_loader(Deadly(17, 1), BOUNDED_8, **more)), BOUNDED_8)


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.on_request), "forkserver"])
def test_other_start_methods(method: str) -> None:
    """The context given starts the replacement."""
    context = multiprocessing.get_context(method)
    loader = _loader(Deadly(17, 1, context=context), multiprocessing_context=method, num_workers=1)
    _check(rows(loader))
    assert loader.stats()["workers"]["died"] == 1


def test_a_loader_made_in_a_thread() -> None:
    """The thread that starts the workers ends; the replacement lives on."""
    made: list[Any] = []

    def make() -> None:
        loader = _loader(Deadly(50, 1))
        made.extend((loader, iter(loader)))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    _check(rows(made[1]))


def _ragged(key: int) -> Any:
    return torch.full((key % 5 + 1, 40_000), key)


def test_what_the_dead_had_laid_down_stays_as_it_was() -> None:
    """Samples that travel as objects lie in the worker's own memory, which its replacement goes on with."""
    left = _FORK.Value("i", 4, lock=False)

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
    loader = _loader(Costly(1200), num_workers=2, persistent_workers=True)
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
    iterator = iter(_loader(Costly(8), prefetch_factor=4))
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
    loader = _loader(Deadly(17, 2), on_error="skip")
    loader.record_events(tmp_path / "log.jsonl")
    assert len(rows(loader)) == _SAMPLES - 1
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert sum('"Lost"' in line for line in lines) == 2
    assert replay.verify(lines) == len(lines) - 1


# --- a sample that kills again and again ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_a_sample_that_kills_is_a_bad_sample(mode: Mode) -> None:
    told: list[Any] = []

    def skip(bad: Any) -> str:
        told.append(bad)
        return "skip"

    loader = _loader(Deadly(17, 9), mode, on_error=skip)
    expected = [row for row in _undisturbed(mode) if row[0] != 17]
    received = rows(loader)
    assert sorted(received) == sorted(expected)
    assert received == expected or mode.lateness
    [bad] = told
    assert (bad.epoch, bad.index, bad.lane, bad.error) == (0, 17, "cpu", "KilledWorkers")
    assert bad.position is not None and "killed by signal: Killed" in bad.traceback
    assert loader.stats()["workers"]["died"] == 2 and loader.stats()["samples_failed"] == 1


def test_it_raises_when_its_batch_is_due() -> None:
    order = [row[0] for row in _undisturbed()]
    received: list[int] = []

    def consume() -> None:
        for batch in _loader(Deadly(17, 9)):
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
    times = _FORK.Value("i", 1, lock=False)

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

    text = str(error_of(RuntimeError, list, _loader(Costly(40), worker_init_fn=leave)))
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
        return _SAMPLES

    def __getitems__(self, keys: list[int]) -> list[Any]:
        if 17 in keys:
            os.kill(os.getpid(), signal.SIGKILL)
        return [torch.tensor(key) for key in keys]


def test_the_one_of_many_is_found() -> None:
    loader = DataLoader(Many(), 8, num_workers=2, on_worker_death="replace", on_error="skip")
    assert [key for batch in loader for key in batch.tolist()] == [key for key in range(_SAMPLES) if key != 17]
    # the first chunk of a worker is asked for one by one anyway, to see whether samples draw
    assert 2 <= loader.stats()["workers"]["died"] <= 3 and loader.stats()["failures"][0]["index"] == "17"


@pytest.mark.parametrize("order", [{}, {"in_order": False}], ids=["in order", "bounded"])
@pytest.mark.parametrize("times", [1, 9])
def test_a_collate_function_that_kills(order: dict[str, Any], times: int) -> None:
    left = _FORK.Value("i", times, lock=False)

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
    left = _FORK.Value("i", 1, lock=False)

    def make(key: int) -> Any:
        if key == 6 and left.value:
            left.value -= 1
            os.kill(os.getpid(), signal.SIGKILL)
        return lambda: key  # cannot be pickled

    def collate(samples: list[Any]) -> list[int]:
        return [sample() for sample in samples]

    loader = DataLoader(Made(16, make), 4, num_workers=2, collate_fn=collate, in_order=False, on_worker_death="replace")
    assert sorted(key for batch in loader for key in batch) == list(range(16))


# --- the processes that fork replacements ---------------------------------------------------------------------


def _both(lane: Any) -> list[int]:
    """The one that forks and its spare, once there are two."""
    assert wait_until(lambda: len(lane._pool._spawner.pids) == 2)
    return list(lane._pool._spawner.pids)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def _kill(lane: Any, pid: int) -> None:
    """One of the two, until another is in its place."""
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: pid not in lane._pool._spawner.pids)
    _both(lane)


def _kill_worker(lane: Any, number: int) -> None:
    pid = lane.pids[number]
    with contextlib.suppress(ProcessLookupError):  # it has ended with the one that forked it
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: lane.pids[number] != pid)


def _ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("which", [0, 1], ids=["the one that forks", "its spare"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_one_that_forks_is_killed(
    times: int, which: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers die before and after: those that it had forked end with it, and all are replaced."""
    monkeypatch.setattr(deaths, "STARTS", 1000)  # those killed here may not have come to take any work
    loader = _loader(Costly(100))
    iterator = iter(loader)
    received = next(iterator).tolist()
    lane = iterator._engine.pump.lanes["cpu"]
    seen = {*_both(lane), *lane.pids}
    _kill_worker(lane, 0)
    for _ in range(times):
        _kill(lane, _both(lane)[which])
        _kill_worker(lane, 1)
        seen |= {*_both(lane), *lane.pids}
    received += [key for batch in iterator for key in batch.tolist()]
    assert sorted(received) == list(range(100))
    assert caplog.text.count("A process that starts replacements of workers") == times
    assert wait_until(lambda: all(_ended(pid) for pid in seen))


def test_the_one_that_forks_is_killed_when_it_is_asked() -> None:
    """The other one answers."""
    iterator = iter(_loader(Costly(100)))
    received = next(iterator).tolist()
    lane = iterator._engine.pump.lanes["cpu"]
    first, spare = _both(lane)
    _stop(first)
    pid = lane.pids[0]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: lane._pool._spawner._asked)
    _kill(lane, first)
    assert wait_until(lambda: lane.pids[0] != pid)
    assert psutil.Process(lane.pids[0]).ppid() == spare == _both(lane)[0]
    received += [key for batch in iterator for key in batch.tolist()]
    assert sorted(received) == list(range(100))


def test_a_loader_that_is_left_at_once_leaves_no_process_that_forks() -> None:
    """Even if the spare is being forked just then."""
    iterator = iter(_loader(Costly(400)))
    iterator._engine.close()
    assert wait_until(lambda: not child_pids())


# --- what is an error all the same ---------------------------------------------------------------------------


def test_start_functions_that_kill_end_the_loader() -> None:
    loader = _loader(Costly(40), worker_init_fn=lambda worker: os._exit(1))
    assert "3 workers in a row ended before they had taken any work" in str(error_of(RuntimeError, list, loader))
    assert wait_until(lambda: not child_pids())


def test_both_processes_that_fork_are_killed() -> None:
    """Stopped first, so that neither has time to fork another."""
    iterator = iter(_loader(Costly(400)))
    next(iterator)
    lane = iterator._engine.pump.lanes["cpu"]
    both = _both(lane)
    for pid in both:
        _stop(pid)
    for pid in (*both, lane.pids[0]):
        os.kill(pid, signal.SIGKILL)
    text = str(error_of(RuntimeError, list, iterator))
    assert "could not be replaced: both processes that start replacements have been killed" in text
    assert wait_until(lambda: not child_pids())


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


# --- the end of the parent -----------------------------------------------------------------------------------


def _parent(pipe: Any, kills: bool) -> None:
    iterator = iter(_loader(Costly(400)))
    next(iterator)
    lane = iterator._engine.pump.lanes["cpu"]
    if kills:
        _kill(lane, _both(lane)[0])
    _kill_worker(lane, 0)
    pipe.send([*lane.pids, *_both(lane)])
    signal.pause()


@pytest.mark.parametrize("kills", [False, True], ids=["both as they were", "one that forks was killed before"])
def test_nothing_is_left_when_the_parent_is_killed(kills: bool) -> None:
    mine, theirs = _FORK.Pipe()
    parent = _FORK.Process(target=_parent, args=(theirs, kills))
    parent.start()
    assert mine.poll(30)
    processes = [psutil.Process(pid) for pid in mine.recv()]
    assert len(processes) == 4 and all(process.is_running() for process in processes)
    parent.kill()
    parent.join()
    assert wait_until(
        lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    )
    for each in (parent, mine, theirs):
        each.close()
