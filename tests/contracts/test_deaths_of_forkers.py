"""The processes that fork replacements die as well: one takes the other's place."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import psutil
import pytest

from minato_gpu.engine import deaths
from tests.contracts.datasets import Costly
from tests.contracts.deadly import FORK, deadly_loader
from tests.support.leaks import descriptors_below, gone, no_child_stays, stop
from tests.support.raising import error_of
from tests.support.waiting import wait_until


def _both(lane: Any) -> list[int]:
    """The one that forks and its spare, once there are two."""
    assert wait_until(lambda: len(_pids(lane)) == 2)
    return _pids(lane)


def _pids(lane: Any) -> list[int]:
    return [side.pid for side in lane._pool._spawner._sides if side.pid >= 0]


def _kill(lane: Any, pid: int) -> None:
    """One of the two, until another is in its place."""
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: pid not in _pids(lane))
    _both(lane)


def _kill_worker(lane: Any, number: int) -> None:
    pid = lane.pids[number]
    with contextlib.suppress(ProcessLookupError):  # it has ended with the one that forked it
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: lane.pids[number] != pid)


@pytest.mark.parametrize("which", [0, 1], ids=["the one that forks", "its spare"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_one_that_forks_is_killed(
    times: int, which: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers die before and after: those that it had forked end with it, and all are replaced."""
    monkeypatch.setattr(deaths, "STARTS", 1000)  # those killed here may not have come to take any work
    loader = deadly_loader(Costly(100))
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
    assert wait_until(lambda: all(gone(pid) for pid in seen))


def test_the_one_that_forks_is_killed_when_it_is_asked() -> None:
    """The other one answers."""
    iterator = iter(deadly_loader(Costly(100)))
    received = next(iterator).tolist()
    lane = iterator._engine.pump.lanes["cpu"]
    first, spare = _both(lane)
    stop(first)
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
    with no_child_stays():
        iterator = iter(deadly_loader(Costly(400)))
        iterator._engine.close()


def test_both_processes_that_fork_are_killed() -> None:
    """Stopped first, so that neither has time to fork another."""
    with no_child_stays():
        iterator = iter(deadly_loader(Costly(400)))
        next(iterator)
        lane = iterator._engine.pump.lanes["cpu"]
        both = _both(lane)
        for pid in both:
            stop(pid)
        for pid in (*both, lane.pids[0]):
            os.kill(pid, signal.SIGKILL)
        text = str(error_of(RuntimeError, list, iterator))
        assert "could not be replaced: both processes that start replacements have been killed" in text


def test_one_that_is_started_anew_cannot_be_watched() -> None:
    """Its descriptor is lost, as this process may have no more."""
    with no_child_stays():
        iterator = iter(deadly_loader(Costly(400)))
        next(iterator)
        lane = iterator._engine.pump.lanes["cpu"]
        _both(lane)
        with descriptors_below(3):
            os.kill(lane.pids[0], signal.SIGKILL)
            text = str(error_of(RuntimeError, list, iterator))
        assert "could not be replaced: Too many open files" in text


def _parent(pipe: Any, kills: bool) -> None:
    iterator = iter(deadly_loader(Costly(400)))
    next(iterator)
    lane = iterator._engine.pump.lanes["cpu"]
    if kills:
        _kill(lane, _both(lane)[0])
    _kill_worker(lane, 0)
    pipe.send([*lane.pids, *_both(lane)])
    signal.pause()


@pytest.mark.parametrize("kills", [False, True], ids=["both as they were", "one that forks was killed before"])
def test_nothing_is_left_when_the_parent_is_killed(kills: bool) -> None:
    mine, theirs = FORK.Pipe()
    parent = FORK.Process(target=_parent, args=(theirs, kills))
    parent.start()
    assert mine.poll(30)
    pids = mine.recv()
    assert len(pids) == 4 and not any(gone(pid) for pid in pids)
    parent.kill()
    parent.join()
    assert wait_until(lambda: all(gone(pid) for pid in pids))
    for each in (parent, mine, theirs):
        each.close()
