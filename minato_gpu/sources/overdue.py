"""Who has waited too long, of many who wait the same time: one timer for all of them.

They stand in the order in which they began, so the first is always due first. A timer of one's own for each would be
set and taken back thousands of times a second, and hardly ever go off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SLACK_S = 1e-3  # what is due so soon is taken along: the event loop's own clock is no finer


class Overdue(Generic[T]):
    """``after_s`` tells how long is too long, or None while that is not known; ``act`` is called once for each then."""

    def __init__(self, after_s: Callable[[], float | None], act: Callable[[T], None]) -> None:
        self._after_s, self._act = after_s, act
        self._loop = asyncio.get_running_loop()
        self._since: dict[T, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, each: T, now: float) -> None:
        """It waits from now on, which is not before any other does."""
        self._since[each] = now
        if self._timer is None:
            self._set()

    def remove(self, each: T) -> None:
        """It does not wait any more."""
        self._since.pop(each, None)

    def look(self) -> None:
        """Act on those that are due; to be called, too, where they may be so sooner than was known."""
        after = self._after_s()
        if after is None:
            return
        limit = self._loop.time() - after + SLACK_S
        due = []
        for each, since in self._since.items():
            if since > limit:
                break
            due.append(each)
        for each in due:
            if self._since.pop(each, None) is not None:  # one that was acted on may have ended another
                self._act(each)
        self._set()

    def close(self) -> None:
        """Nobody waits any more."""
        self._since.clear()
        self._set()

    def _set(self) -> None:
        """A timer for the first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        after = self._after_s()
        if after is not None and self._since:
            self._timer = self._loop.call_at(next(iter(self._since.values())) + after, self.look)
