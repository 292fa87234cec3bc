"""How many calls something makes, or how many operations: what it costs, the same in every run."""

from __future__ import annotations

import cProfile
import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(function: Callable[[], object]) -> int:
    """Calls of Python functions that this one makes in this thread."""
    profile = cProfile.Profile(builtins=False)
    gc.disable()  # or finalizers of others would be counted
    try:
        profile.runcall(function)
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats()) - 1  # itself


def operations_of(function: Callable[[], object]) -> int:
    """Operations of the interpreter in this thread: a loop counts as often as it turns, what runs in C as one."""
    operations = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal operations
        frame.f_trace_opcodes = True
        operations += event == "opcode"
        return count

    gc.disable()
    before = sys.gettrace()  # coverage, perhaps
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return operations
