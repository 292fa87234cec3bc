"""Ranks of one job end their phases at the same batch: rank 0 decides, the others read what it decided.

Their steps wait for each other (gradients are averaged), so a rank that went on to another phase by its own clock would
be measured in the others' phase, and one that stopped would leave them waiting for ever. Decisions are bytes of a file
that all ranks of a host can read, one after the other; no collective is added to the script's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

_YES, _NO = b"Y", b"N"
_PATIENCE_S = 60.0  # a rank whose leader has gone decides by itself
_NAME = "decisions"


class Lockstep:
    """``rank`` of ``ranks``; alone, it decides by itself."""

    def __init__(self, folder: Path, rank: int, ranks: int, clock: Callable[[], float] = monotonic) -> None:
        self.rank, self.ranks = rank, ranks
        self.lost = False  # the leader
        self._clock = clock
        self._number = 0
        self._file = -1
        if ranks > 1:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if rank == 0 else 0)
            self._file = os.open(folder / _NAME, flags, 0o600)

    def agreed(self, mine: bool) -> bool:
        """What rank 0 thinks; every rank has to ask as many times."""
        number, self._number = self._number, self._number + 1
        if self._file < 0 or self.lost:
            return mine
        if self.rank == 0:
            os.pwrite(self._file, _YES if mine else _NO, number)
            return mine
        until = self._clock() + _PATIENCE_S
        pause = 1e-4
        while not (told := os.pread(self._file, 1, number)):
            if self._clock() > until:
                self.lost = True
                return mine
            sleep(pause)
            pause = min(2 * pause, 1e-2)
        return told == _YES

    def close(self) -> None:
        """Let go of the file; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
