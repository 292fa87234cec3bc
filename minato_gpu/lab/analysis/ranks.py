"""The ranks of one job on this host: where they meet, and how they end their phases at the same batch.

Their steps wait for each other (gradients are averaged), so a rank that went on to another phase by its own clock would
be measured in the others' phase, and one that stopped would leave them waiting for ever. Rank 0 decides; its decisions
are bytes of a file that all ranks of a host can read, one after the other. No collective is added to the script's own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from minato_gpu.lab.analysis.files import FOLDER


@dataclass(frozen=True)
class Ranks:
    """This process's rank, as torchrun says; alone without it. All ranks of the job are on this host."""

    rank: int = 0
    ranks: int = 1

    @classmethod
    def of_environment(cls) -> Ranks:
        """Reads RANK, WORLD_SIZE and LOCAL_WORLD_SIZE. Raises ValueError if some ranks are on other hosts."""
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        if here != ranks:  # they could not meet in a folder, and would end their phases at different batches
            raise ValueError(
                f"{ranks - here} of {ranks} ranks are on other hosts; analyze the job with those of one host"
            )
        return cls(int(os.environ.get("RANK", 0)), ranks)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yields a private folder that all ranks of this host find: they have the same parent. Rank 0 removes it.

        Raises PermissionError if one of that name is another user's.
        """
        if self.ranks == 1:
            with tempfile.TemporaryDirectory(prefix=FOLDER) as path:
                yield Path(path)
            return
        at = Path(tempfile.gettempdir()) / f"{FOLDER}{os.getuid()}_{_parent()}"
        at.mkdir(mode=0o700, exist_ok=True)
        if at.is_symlink() or at.stat().st_uid != os.getuid():
            raise PermissionError(f"{at} belongs to somebody else")
        (at / f"rank-{self.rank}").unlink(missing_ok=True)
        try:
            yield at
        finally:
            if self.rank == 0:
                shutil.rmtree(at, ignore_errors=True)


def _parent() -> str:
    """Returns the process that has started all ranks, and when it began: others had its id before."""
    parent = os.getppid()
    begun = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"{parent}_{begun}"


_YES, _NO = b"Y", b"N"
_PATIENCE_S = 60.0
_NAME = "decisions"


class Lockstep:
    """Lets all ranks of a host decide as rank 0 does; alone, it decides by itself."""

    def __init__(self, folder: Path, rank: int, ranks: int, clock: Callable[[], float] = monotonic) -> None:
        self._leads, self._clock = rank == 0, clock
        self._number = 0
        self._file = -1
        if ranks > 1:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if rank == 0 else 0)
            self._file = os.open(folder / _NAME, flags, 0o600)

    def agreed(self, mine: bool) -> bool:
        """Returns rank 0's opinion, which is its ``mine``; other ranks wait for it. Every rank has to ask as many
        times.

        Raises TimeoutError if rank 0 has not answered for a minute.
        """
        number, self._number = self._number, self._number + 1
        if self._file < 0:
            return mine
        if self._leads:
            os.pwrite(self._file, _YES if mine else _NO, number)
            return mine
        until = self._clock() + _PATIENCE_S
        pause = 1e-4
        while not (told := os.pread(self._file, 1, number)):
            if self._clock() > until:
                raise TimeoutError("rank 0, which decides when a phase ends, has not answered for a minute")
            sleep(pause)
            pause = min(2 * pause, 1e-2)
        return told == _YES

    def close(self) -> None:
        """Lets go of the file; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
