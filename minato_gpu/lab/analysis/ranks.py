"""Which rank of a job this is, and where the ranks of this host meet."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minato_gpu.lab.analysis.notes import FOLDER


@dataclass(frozen=True)
class Ranks:
    """``rank`` of ``ranks``, of which ``here`` are on this host, as torchrun tells; alone where nobody does."""

    rank: int = 0
    ranks: int = 1
    here: int = 1

    @classmethod
    def of_environment(cls) -> Ranks:
        """From RANK, WORLD_SIZE and LOCAL_WORLD_SIZE. Raises ValueError where ranks are elsewhere, too."""
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        rank = int(os.environ.get("RANK", 0))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        if not 0 <= rank < ranks:
            raise ValueError(f"RANK={rank} is no rank of WORLD_SIZE={ranks}")
        if here != ranks:  # they could not meet in a folder, and would end their phases at different batches
            raise ValueError(
                f"{ranks - here} of {ranks} ranks are on other hosts; analyze the job with those of one host"
            )
        return cls(rank, ranks, here)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A private folder that all ranks of this host find: they have the same parent. Rank 0 removes it."""
        if self.ranks == 1:
            with tempfile.TemporaryDirectory(prefix=FOLDER) as path:
                yield Path(path)
            return
        at = Path(tempfile.gettempdir()) / f"{FOLDER}{os.getuid()}_{_parent()}"
        at.mkdir(mode=0o700, exist_ok=True)
        if at.is_symlink() or at.stat().st_uid != os.getuid():
            raise PermissionError(f"{at} belongs to somebody else")
        (at / f"rank-{self.rank}.json").unlink(missing_ok=True)
        try:
            yield at
        finally:
            if self.rank == 0:
                shutil.rmtree(at, ignore_errors=True)


def _parent() -> str:
    """The process that has started all ranks, told apart from those that had its id before."""
    parent = os.getppid()
    try:
        begun = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        begun = "0"
    return f"{parent}_{begun}"
