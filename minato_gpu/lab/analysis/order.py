"""What the command and the process that runs the script tell each other: two small files of JSON in a folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from minato_gpu.lab.analysis.profile import Profile, profile_from, with_tuples
from minato_gpu.lab.analysis.setting import Setting, Trial
from minato_gpu.lab.report import write_whole

Status = Literal["starting", "measuring", "complete", "ended", "died", "stopped"]
FINAL = ("complete", "ended", "died", "stopped")


@dataclass(frozen=True)
class Order:
    """Run ``script`` with ``arguments``, and analyse it for ``seconds``.

    ``script``: a path, or a module's name where it ``is_module``. ``loader``: which of its loaders, from 1 on; None:
    the one for training. ``folder``: where results are left. ``verify_s``: seconds for other settings, after that.
    """

    script: str
    arguments: tuple[str, ...]
    folder: str
    seconds: float
    is_module: bool = False
    loader: int | None = None
    rank: int = 0
    ranks: int = 1
    verify_s: float = 0.0

    def text(self) -> str:
        """For the command line of the process."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Order:
        """And back."""
        return Order(**with_tuples(json.loads(text)))


@dataclass(frozen=True)
class Result:
    """How far the analysis of one rank has come. ``message``: what ended the script, in a sentence. ``loaders``: that
    it iterated, each in a few words. ``tried``: other settings."""

    status: Status
    rank: int
    message: str = ""
    profile: Profile | None = None
    loaders: tuple[str, ...] = ()
    tried: tuple[Trial, ...] = ()

    def leave(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        write_whole(folder / f"rank-{self.rank}.json", json.dumps(asdict(self)))


def result_of(folder: Path, rank: int) -> Result | None:
    """What this rank has left so far."""
    try:
        values = with_tuples(json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    profile = values["profile"]
    values["profile"] = None if profile is None else profile_from(profile)
    values["tried"] = tuple(Trial(**{**each, "setting": Setting(**each["setting"])}) for each in values["tried"])
    return Result(**values)


def in_one_line(error: BaseException) -> str:
    """Its type and the first line of its message; of one that quotes a worker's traceback, as PyTorch's do, the last,
    which has both."""
    kind, lines = type(error).__name__, str(error).strip().splitlines()
    if any("Traceback (most recent call last)" in line for line in lines):
        return lines[-1].strip()
    return f"{kind}: {lines[0]}" if lines else kind
