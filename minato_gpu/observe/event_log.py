"""Writes every event and instruction of a scheduler to a file, to be replayed later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.replay import header, line


class EventLog:
    """Overwrites ``path`` with JSON lines (see ``scheduling/replay.py``); each run begins with its policy."""

    def __init__(self, path: Path, policy: Policy) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._policy = policy
        self._begun = False

    def begin(self) -> None:
        """Writes that a new run begins, with a new scheduler."""
        self._begun = True
        self._file.write(header(self._policy) + "\n")

    def __call__(self, event: m.Event, instructions: Sequence[m.Instruction]) -> None:
        if self._begun:  # a worker may die before the first run, which begins with another scheduler
            self._file.write(line(event, instructions) + "\n")

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()
