"""Event loops of tests: real ones, and one whose clock jumps to what is due next, so that minutes of waiting take no
time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

Test = Callable[..., Coroutine[Any, Any, None]]


def in_a_loop(test: Test) -> Callable[..., None]:
    """Runs a test in an event loop of its own."""

    @wraps(test)
    def work(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    return work


class _Selector(selectors.SelectSelector):
    """Never waits: the clock goes on instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout:
            self.loop.now += timeout
        if not found and timeout is None:
            raise RuntimeError("nothing is due any more, and somebody waits")
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time goes on only where nothing else is left to do."""

    def __init__(self) -> None:
        self.now = 1000.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds."""
        return self.now


def on_a_virtual_clock(test: Test) -> Callable[..., None]:
    """Runs a test in such a loop."""

    @wraps(test)
    def work(**fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(**fixtures))

    return work
