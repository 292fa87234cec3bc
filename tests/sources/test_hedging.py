"""Second requests are few, and stop where the storage is asked too much; one timer says who is late."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from minato_gpu.sources.hedging import Hedging, is_final, is_refusal
from minato_gpu.sources.remote import Overdue
from tests.sources.virtual import run


def test_one_for_twenty_requests_and_none_while_the_storage_is_asked_too_much() -> None:
    hedging, sent = Hedging(), 0
    for number in range(4000):
        hedging.finished(0.05)
        sent += hedging.take(float(number))
    assert 195 <= sent <= 205
    for _ in range(20):
        hedging.finished(0.05)
    hedging.refused(5000.0)
    assert [hedging.take(now) for now in (5000.5, 5004.5, 5005.5)] == [False, False, True]


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
