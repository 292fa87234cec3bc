"""What is read and written of shared words, and between which fences, as a list."""

from __future__ import annotations

import mmap
from typing import Any

from minato_gpu.memory.status_board import WorkerStatusBoard

FENCE = "fence"
Event = str | tuple[str, int]
"""A fence, or ("read" or "write", index of the word)."""


def cleared_board(workers: int) -> WorkerStatusBoard:
    """A board in memory of its own, which processes share that are forked."""
    board = WorkerStatusBoard(workers, memoryview(mmap.mmap(-1, WorkerStatusBoard.size(workers))))
    board.clear()
    return board


class WatchedWords:
    """Words that note in ``events`` who reads and writes them."""

    def __init__(self, words: Any, events: list[Event]) -> None:
        self._words = words
        self._events = events

    def __getitem__(self, at: int) -> int:
        self._events.append(("read", at))
        return int(self._words[at])

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value
        self._events.append(("write", at))

    def release(self) -> None:
        self._words.release()


class WatchedBarrier:
    """A lock whose release is a fence."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        self._events.append(FENCE)

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


def watch(board: Any) -> list[Event]:
    """Watch the board's words and fences from now on; returns the list, which grows."""
    events: list[Event] = []
    board.words = WatchedWords(board.words, events)
    board.barrier = WatchedBarrier(events)
    return events


def fenced(events: list[Event], first: Event, then: Event) -> bool:
    """Whether every ``first`` comes before every ``then``, with a fence between the two."""
    last, begin = len(events) - events[::-1].index(first), events.index(then)
    return last <= begin and FENCE in events[last:begin]


def before(events: list[Event], first: Event, then: Event) -> bool:
    """Whether every ``first`` comes before every ``then``."""
    return len(events) - events[::-1].index(first) <= events.index(then)
