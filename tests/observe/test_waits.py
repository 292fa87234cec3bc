"""Waits of the training loop: their causes, and the sample that came last."""

from __future__ import annotations

from itertools import pairwise

from minato_gpu.observe.facts import Facts, Stalled
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.observe.waits import LongestWaits, Wait
from minato_gpu.samples import TicketId
from minato_gpu.window.records import Record
from tests.support.tickets import spans


def waited(begin: float, *parts: tuple[str, float]) -> Wait:
    """A wait for these causes, each until so many seconds after the wait began."""
    wait = Wait(begin, parts[0][0])
    for (_, until), (cause, _) in pairwise(parts):
        wait.look(begin + until, cause)
    wait.end(begin + parts[-1][1])
    return wait


def test_seconds_count_for_the_cause_of_their_time() -> None:
    wait = waited(10.0, ("preparation", 1.0), ("preparation", 2.0), ("slow sample", 5.0), ("preparation", 5.5))
    assert wait.parts == [("preparation", 10.0, 12.0), ("slow sample", 12.0, 15.0), ("preparation", 15.0, 15.5)]
    assert wait.by_cause() == {"preparation": 2.5, "slow sample": 3.0}


def test_a_wait_is_counted_once_and_told_in_its_parts() -> None:
    facts, heard = Facts(), list[object]()
    facts.subscribe(heard.append)
    log = Telemetry(0.0, 3, facts)
    log.stalled(waited(10.0, ("preparation", 1.0), ("slow sample", 4.0)))
    assert log.stats(20.0)["stalls"] == {
        "preparation": {"count": 0, "seconds": 1.0},
        "slow sample": {"count": 1, "seconds": 3.0},
    }
    assert heard == [Stalled(3, "preparation", 10.0, 11.0), Stalled(3, "slow sample", 11.0, 14.0)]


def test_the_sample_that_came_last_is_of_the_batch() -> None:
    """Keys are a thousand more than tickets; what came into the window during the wait is not known."""
    places = [Record(0, TicketId(first), [], [*range(1000 + first, 1010 + first)], None) for first in (10, 20)]
    wait = Wait(0.0, "preparation", places)
    wait.arrivals.extend(
        [("cpu", 0, spans((10, 14))), ("far", 1, spans((17, 23))), ("cpu", 0, spans((23, 25), (30, 31)))]
    )
    assert wait.last_of(spans((10, 20))) == (1019, "far", 1)
    assert wait.last_of(spans((11, 13))) == (1012, "cpu", 0)
    assert wait.last_of(spans((14, 16))) is None
    assert wait.last_of(spans((24, 25), (30, 32))) == (None, "cpu", 0)


def test_the_ten_longest_stay() -> None:
    longest = LongestWaits()
    for batch, seconds in enumerate([5.0, 1.0, *[3.0] * 9, 4.0]):
        longest.add(waited(0.0, ("fetch", seconds)), batch, ())
    found = longest.stats()
    assert [each["seconds"] for each in found] == [5.0, 4.0, *[3.0] * 8]
    assert [each["batch"] for each in found] == [0, 11, *range(2, 10)]
    assert found[0] == {"batch": 0, "seconds": 5.0, "causes": {"fetch": 5.0}, "key": None, "lane": None, "worker": None}
