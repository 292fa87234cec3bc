"""When a worker is taken to hang: decided from what the workers show, at times that the test says."""

from __future__ import annotations

import pytest

from minato_gpu.faults.watchdog import Hung, Watchdog
from minato_gpu.memory.board import Claim

LIMIT = 10.0


class Shown:
    """What workers show: by number, since when they have been at what they are at."""

    together = 1

    def __init__(self) -> None:
        self.since: dict[int, float] = {}

    def at_work(self) -> dict[int, tuple[float, Claim]]:
        """As lanes tell it."""
        return {n: (since, Claim(1, n, 1, 0)) for n, since in self.since.items()}


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def watchdog(shown: Shown) -> Watchdog:
    return Watchdog({"cpu": shown}, LIMIT)


def hung(watchdog: Watchdog, begin: float, end: float) -> tuple[float, list[int]]:
    """Look whenever it is due from ``begin`` to ``end``; when some are first found to hang, and which."""
    now = watchdog.next_look(begin)
    while now < end:
        found = watchdog.look(now)
        if found:
            return now, [each.worker for each in found]
        assert watchdog.next_look(now) > now
        now = watchdog.next_look(now)
    return end, []


def test_one_that_hangs_is_found_soon_after_the_limit(watchdog: Watchdog, shown: Shown) -> None:
    shown.since = {0: 100.0, 1: 103.0}
    at, found = hung(watchdog, 100.0, 200.0)
    assert found == [0] and 110.0 <= at < 113.0


def test_one_that_goes_on_does_not_hang(watchdog: Watchdog, shown: Shown) -> None:
    now = watchdog.next_look(100.0)
    while now < 200.0:
        shown.since[0] = now - 0.9 * LIMIT
        assert watchdog.look(now) == []
        now = watchdog.next_look(now)


def test_one_that_could_not_report_does_not_hang(watchdog: Watchdog, shown: Shown) -> None:
    """It is found overdue, and has gone on a moment later."""
    shown.since[0] = 100.0
    now = watchdog.next_look(100.0)
    while now < 110.0:
        assert watchdog.look(now) == []
        now = watchdog.next_look(now)
    assert watchdog.look(now) == [] and now < watchdog.next_look(now) < now + 0.1
    shown.since[0] = now
    assert hung(watchdog, now, 119.0) == (119.0, [])


def test_one_that_cannot_be_ended_is_told_of_again_later(watchdog: Watchdog, shown: Shown) -> None:
    shown.since[0] = 100.0
    at, _ = hung(watchdog, 100.0, 200.0)
    assert watchdog.next_look(at) == at + LIMIT
    assert hung(watchdog, at, 200.0) == (at + LIMIT, [0])


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
    assert watchdog.look(back) == []
    assert hung(watchdog, back, back + LIMIT / 3)[1] == []
    shown.since[0] = back + LIMIT / 3
    assert hung(watchdog, back + LIMIT / 3, back + LIMIT)[1] == []


def test_one_that_hangs_is_found_after_the_job_was_stopped(watchdog: Watchdog, shown: Shown) -> None:
    watchdog.next_look(100.0)
    shown.since[0] = 100.0
    assert watchdog.look(150.0) == []
    at, found = hung(watchdog, 150.0, 300.0)
    assert found == [0] and 160.0 <= at < 163.0


def test_a_graph_of_several_samples_has_the_limit_for_each(watchdog: Watchdog, shown: Shown) -> None:
    shown.together = 3
    shown.since[0] = 100.0
    at, found = hung(watchdog, 100.0, 200.0)
    assert found == [0] and 130.0 <= at < 133.0


def test_each_lane_is_watched() -> None:
    lanes = {"cpu": Shown(), "device": Shown()}
    watchdog = Watchdog(lanes, LIMIT)
    lanes["device"].since[0] = 100.0
    now, found = watchdog.next_look(100.0), list[Hung]()
    while not found:
        lanes["cpu"].since[0] = now - 1.0
        found = watchdog.look(now)
        now = watchdog.next_look(now)
    assert [(each.lane, each.worker) for each in found] == [("device", 0)]
