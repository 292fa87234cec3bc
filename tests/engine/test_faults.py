"""When a worker is taken to hang: decided from what the workers show, at times that the test says."""

from __future__ import annotations

import gc
import weakref

import pytest

from minato_gpu.faults.deferred_error import DeferredError
from minato_gpu.faults.watchdog import Hung, Watchdog
from minato_gpu.lanes.contract import AtWork
from minato_gpu.memory.status_board import Claim

LIMIT = 10.0


class Shown:
    """What workers show: by number, since when they have been at what they are at."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        self.since: dict[int, float] = {}
        self.together = 1

    def look(self, now: float) -> list[Hung]:
        """What the watchdog says to it."""
        told = [AtWork(n, Claim(1, n, 1, 0), since, self.together) for n, since in self.since.items()]
        return self.watchdog.look(now, {"cpu": told})


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog({}, LIMIT)


@pytest.fixture
def shown(watchdog: Watchdog) -> Shown:
    return Shown(watchdog)


def hung(shown: Shown, begin: float, end: float) -> tuple[float, list[int]]:
    """Look whenever it is due from ``begin`` to ``end``; when some are first found to hang, and which."""
    watchdog = shown.watchdog
    now = watchdog.next_look(begin)
    while now < end:
        found = shown.look(now)
        if found:
            return now, [each.worker for each in found]
        assert watchdog.next_look(now) > now
        now = watchdog.next_look(now)
    return end, []


def test_one_that_could_not_report_does_not_hang(watchdog: Watchdog, shown: Shown) -> None:
    """It is found overdue, and has gone on a moment later."""
    shown.since[0] = 100.0
    now = watchdog.next_look(100.0)
    while now < 110.0:
        assert shown.look(now) == []
        now = watchdog.next_look(now)
    assert shown.look(now) == [] and now < watchdog.next_look(now) < now + 0.1
    shown.since[0] = now
    assert hung(shown, now, 119.0) == (119.0, [])


@pytest.mark.parametrize("stopped", [0.5, 0.8, 1.05, 3.0, 1000.0])
@pytest.mark.parametrize("at", [0.0, 0.1, 0.24, 0.25])
def test_a_job_that_was_stopped_has_no_worker_that_hangs(
    watchdog: Watchdog, shown: Shown, stopped: float, at: float
) -> None:
    """The clock runs on, and nobody works: samples that take a third of the limit are none that hang."""
    watchdog.next_look(100.0)
    begun = 100.0 + at * LIMIT
    shown.since[0] = begun
    back = begun + stopped * LIMIT
    assert shown.look(back) == []
    assert hung(shown, back, back + LIMIT / 3)[1] == []
    shown.since[0] = back + LIMIT / 3
    assert hung(shown, back + LIMIT / 3, back + LIMIT)[1] == []


def test_one_that_hangs_is_found_after_the_job_was_stopped(watchdog: Watchdog, shown: Shown) -> None:
    watchdog.next_look(100.0)
    shown.since[0] = 100.0
    assert shown.look(150.0) == []
    at, found = hung(shown, 150.0, 300.0)
    assert found == [0] and 160.0 <= at < 163.0


def test_a_graph_of_several_samples_has_the_limit_for_each(watchdog: Watchdog, shown: Shown) -> None:
    shown.together = 3
    shown.since[0] = 100.0
    at, found = hung(shown, 100.0, 200.0)
    assert found == [0] and 130.0 <= at < 133.0


class Held:
    """What a frame holds."""


def _raised(error: Exception) -> tuple[Exception, weakref.ref[Held]]:
    """The error, raised in a frame that holds something."""
    held = Held()
    try:
        raise error
    except Exception as caught:
        return caught, weakref.ref(held)


def test_the_frames_of_an_error_and_of_all_that_it_names_are_let_go() -> None:
    """A cause, a context, members of a group and of a group in it, and what caused those; a circle does no harm."""
    cause, one = _raised(ValueError("cause"))
    deep, two = _raised(KeyError("deep"))
    deep.__cause__ = cause
    inner, three = _raised(ExceptionGroup("inner", [deep, OSError("away")]))
    outer, four = _raised(ExceptionGroup("outer", [inner]))
    cause.__context__ = outer
    later = DeferredError()
    gc.disable()
    try:
        later.keep(outer)
        assert [held() for held in (one, two, three, four)] == [None] * 4
    finally:
        gc.enable()
    assert "inner" in "".join(outer.__notes__) and "in _raised" in "".join(outer.__notes__)
    with pytest.raises(ExceptionGroup) as raised:
        later.raise_kept()
    assert raised.value is outer
    later.raise_kept()
