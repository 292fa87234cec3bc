"""Second requests follow what they bring, and stop where the storage is asked too much; one timer says who is late."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from minato_gpu.sources.hedging import Hedging, is_final, is_refusal
from minato_gpu.sources.remote import Overdue
from tests.sources.virtual import run

_REQUESTS = 4000


def second_requests(*, won: bool) -> int:
    """How many are sent where each of them is answered first, or none is."""
    hedging, sent = Hedging(), 0
    for number in range(_REQUESTS):
        hedging.finished(number, 0.05)
        hedging.overdue(_REQUESTS + number, -1.0)
        if hedging.next(float(number)) is not None:
            sent += 1
            hedging.hedged(won=won)
    return sent


def test_as_many_as_are_allowed_where_they_are_answered_first_and_a_fifth_where_they_never_are() -> None:
    """A storage that only queues answers the first request first."""
    assert 0.045 * _REQUESTS <= second_requests(won=True) <= 0.055 * _REQUESTS
    assert 0.01 * _REQUESTS <= second_requests(won=False) <= 0.011 * _REQUESTS + 16


def test_none_while_the_storage_is_asked_too_much() -> None:
    hedging = Hedging()
    for number in (1, 2, 3):
        hedging.overdue(number, -1.0)
    assert hedging.next(0.0) == 1
    hedging.finished(1, 0.05)
    hedging.refused(1.0)
    assert hedging.next(1.5) is None
    assert hedging.next(7.0) == 2


def _with(error: BaseException, **attributes: Any) -> BaseException:
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def _from(cause: BaseException) -> BaseException:
    error = OSError("translated")
    error.__cause__ = cause
    return error


_BOTO = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}


@pytest.mark.parametrize(
    ("error", "refused", "final"),
    [
        (OSError(errno.EBUSY, "Please reduce your request rate."), True, False),
        (_with(Exception("aiohttp"), status=429), True, False),
        (_with(Exception("adlfs"), status_code=503), True, False),
        (_with(Exception("requests"), response=SimpleNamespace(status_code=503)), True, False),
        (_from(_with(Exception("botocore"), response=_BOTO)), True, False),
        (_with(Exception("gcsfs"), code="conflict"), False, False),
        (_with(Exception("adlfs"), status_code=404), False, True),
        (OSError(errno.EIO, "broken"), False, False),
    ],
)
def test_what_storage_says_is_known_wherever_its_library_says_it(
    error: BaseException, refused: bool, final: bool
) -> None:
    assert (is_refusal(error), is_final(error)) == (refused, final)


def test_what_is_not_slow_any_more_is_not_asked_again() -> None:
    """Since all requests take as long by now: they queue."""
    hedging = Hedging()
    for number in range(64):
        hedging.finished(number, 0.05)
    hedging.overdue(100, since=0.0)
    hedging.overdue(99, since=0.2)
    for number in range(1000, 1512):
        hedging.finished(number, 0.3)
    assert hedging.patience_s is not None and 0.3 < hedging.patience_s < 0.5
    assert hedging.next(0.4) is None
    assert hedging.next(0.5) == 100, "which is slow even so"
    assert hedging.next(0.5) is None


def test_at_its_limit_a_storage_is_asked_again_only_where_that_has_helped() -> None:
    for won in (True, False):
        hedging = Hedging()
        for number in range(3):
            hedging.overdue(number, since=-1.0)
        assert hedging.next(0.0, at_its_limit=True) is None
        assert hedging.next(0.0) == 0
        hedging.hedged(won=won)
        assert hedging.next(0.0, at_its_limit=True) == (1 if won else None)


# --- the timer, on a virtual clock -----------------------------------------------------------------------------


def test_each_is_due_at_its_time_and_only_those_that_still_wait() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, acted = asyncio.get_running_loop(), list[tuple[str, float]]()
        begin = loop.time()
        overdue = Overdue[str](lambda: 10.0, lambda each: acted.append((each, round(loop.time() - begin, 2))))
        for at, each in enumerate("abcd"):
            overdue.add(each, loop.time())
            if at == 2:
                overdue.remove("a")
            await asyncio.sleep(1.0)
        overdue.remove("c")
        await asyncio.sleep(20.0)
        overdue.add("e", loop.time())
        await asyncio.sleep(20.0)
        return acted

    assert run(main()) == [("b", 11.0), ("d", 13.0), ("e", 34.0)]
