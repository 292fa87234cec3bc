"""How many calls something makes, or how many operations: what it costs, the same in every run."""

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
