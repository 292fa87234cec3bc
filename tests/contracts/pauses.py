"""Pauses between statements of the package, some milliseconds at lines that a seed chooses, in each process other ones.

What one process writes and another one reads is right in whatever order their statements take turns. Where it is not,
the turns that show it come once in many thousand runs; a process that pauses at the same line each time makes them come
at once. Nothing waits for a pause, and no result depends on one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import minato_gpu

_PACKAGE = str(Path(minato_gpu.__file__).parent)
_ONE_IN = 4  # lines
_PAUSE_S = 1e-3
_MOST = 10  # at each line


def _tracer(seed: int) -> Any:
    """A function for ``sys.settrace``."""
    times: Counter[tuple[CodeType, int]] = Counter()

    @functools.cache
    def chosen(code: CodeType) -> frozenset[int]:
        if not code.co_filename.startswith(_PACKAGE):
            return frozenset()
        lines = {line for _, _, line in code.co_lines() if line is not None}
        return frozenset(
            line for line in lines if zlib.crc32(f"{seed} {code.co_filename} {line}".encode()) % _ONE_IN == 0
        )

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        place = frame.f_code, frame.f_lineno
        if event == "line" and frame.f_lineno in chosen(frame.f_code) and times[place] < _MOST:
            times[place] += 1
            time.sleep(_PAUSE_S)
        return at_line

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        return at_line if chosen(frame.f_code) else None

    return at_call


def pause(seed: int) -> None:
    """Pause from now on in this thread."""
    sys.settrace(_tracer(seed))


@contextlib.contextmanager
def pauses(seed: int) -> Iterator[None]:
    """Pauses in this thread and in those that begin meanwhile."""
    before = sys.gettrace()
    tracer = _tracer(seed)
    threading.settrace(tracer)
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(None)
