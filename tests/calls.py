"""How many calls something makes: what it costs, the same in every run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(function: Callable[[], object], *, of_c: bool = True) -> int:
    """Calls that this one makes in this thread: of Python functions and, with ``of_c``, of built-in ones."""
    kinds, calls = {"call", "c_call"} if of_c else {"call"}, -1  # itself

    def count(_: FrameType, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in kinds

    gc.disable()  # or finalizers of others would be counted
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
