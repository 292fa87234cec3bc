"""Second requests are few, and what would fail again is not tried again."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from minato_gpu.sources.remote import Hedging, is_final


def test_one_for_twenty_requests() -> None:
    hedging, sent = Hedging(), 0
    for _ in range(4000):
        hedging.finished(0.05)
        sent += hedging.take()
    assert 195 <= sent <= 205


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
    ("error", "final"),
    [
        (OSError(errno.EBUSY, "Please reduce your request rate."), False),
        (_with(Exception("aiohttp"), status=429), False),
        (_with(Exception("adlfs"), status_code=503), False),
        (_with(Exception("requests"), response=SimpleNamespace(status_code=503)), False),
        (_from(_with(Exception("botocore"), response=_BOTO)), False),
        (_with(Exception("gcsfs"), code="conflict"), False),
        (_with(Exception("adlfs"), status_code=404), True),
        (OSError(errno.EIO, "broken"), False),
        (PermissionError("expired"), True),
    ],
)
def test_what_storage_says_is_known_wherever_its_library_says_it(error: BaseException, final: bool) -> None:
    assert is_final(error) == final
