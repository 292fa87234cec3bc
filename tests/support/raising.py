"""Catching an exception without keeping its frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def error_of(error: type[BaseException], function: Callable[..., Any], *arguments: Any) -> BaseException:
    """The exception of type ``error`` that ``function(*arguments)`` raises, without its traceback.

    ``pytest.raises`` keeps the traceback and so the frames, whose locals hold the iterator in a reference cycle.
    PyTorch's iterator takes five seconds per worker to end when the cycle collector finds it.
    """
    try:
        function(*arguments)
    except error as caught:
        caught.__traceback__ = None
        caught.__context__ = None
        caught.__cause__ = None
        return caught
    pytest.fail(f"{error.__name__} was not raised")
