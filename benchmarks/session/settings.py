"""How large a session is, what its document says of itself, and a request for one of its parts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

from benchmarks import report
from benchmarks.isolate import MeasurementError, excerpt, isolated
from minato_gpu.util.threads import usable_cores

Row = dict[str, Any]
Result = TypeVar("Result")

ROOT = Path(__file__).parents[2]
NO_TIME = "no time left"
_LEAST_S = 5.0  # given to whatever has begun, also at the deadline

_TOY = {"workers": 1, "repetitions": 1, "photographs": 0, "batch": 4, "size": 32, "classes": 16}
_TOY_S = {"resident_s": 0.02, "warm_s": 0.02, "opening_s": 0.0, "timed_s": 0.04, "probed_s": 0.02, "settle_s": 0.0}


@dataclass(frozen=True)
class Settings:
    """The size of a session.

    A run of a loader takes ``resident_s`` for steps on resident batches (where there are steps), then ``warm_s`` from
    its first batch on, until it has settled, and ``timed_s`` that count, however slow it is. Where a device lane is
    still opening after ``warm_s``, the run waits until it is at work, up to ``opening_s`` from its first batch on.
    """

    device: str  # "cuda", or "cpu": the stand-ins
    folder: Path  # class folders of photographs
    quick: bool = False  # toy size
    workers: int = field(default_factory=lambda: max(1, usable_cores() - 2))
    repetitions: int = 5
    photographs: int = 2000
    batch: int = 256
    size: int = 224
    classes: int = 1000
    resident_s: float = 1.0
    warm_s: float = 3.0
    opening_s: float = 15.0  # importing DALI and building graphs took 4 to 7 s on an H200
    timed_s: float = 3.0
    probed_s: float = 2.0  # for the rate of a way of decoding
    settle_s: float = 0.3  # between two processes

    @classmethod
    def usual(cls, device: str, folder: Path, *, quick: bool) -> Settings:
        """The size of a real run, or of a toy."""
        return cls(device, folder, quick, **(_TOY | _TOY_S if quick else {}))  # type: ignore[arg-type]

    @property
    def batch_bytes(self) -> int:
        return self.batch * 3 * self.size**2 * 4


def described(settings: Settings, commit: str | None) -> Row:
    """The document without rows. It asks CUDA: not in a process that forks others afterwards."""
    on_gpu = settings.device == "cuda"
    about = {name: value for name, value in asdict(settings).items() if name != "folder"}
    about |= {
        "commit": commit or _first_line("git", "rev-parse", "HEAD"),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
    }
    return report.document("gpu_session", about, [])


def _first_line(*command: str) -> str | None:
    """What a command prints; None where there is no such command, or it prints nothing."""
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(found.stdout.strip().splitlines()), None)


@dataclass(frozen=True)
class Request:
    """A part that is to be run until ``deadline`` (by ``perf_counter``). ``rows``: all that is known."""

    settings: Settings
    rows: Sequence[Mapping[str, Any]]
    deadline: float

    def time_for(self, seconds: float) -> bool:
        """Returns whether something that takes so long ends in time."""
        return perf_counter() + seconds < self.deadline

    def isolated(self, most_s: float, function: Callable[..., Result], *arguments: Any) -> Result:
        """Returns ``function(*arguments)`` of a fresh process, which has ``most_s`` seconds, or those that are left.

        Raises MeasurementError.
        """
        limit_s = max(_LEAST_S, min(most_s, self.deadline - perf_counter()))
        return isolated(function, *arguments, timeout_s=limit_s, settle_s=self.settings.settle_s)

    def row(self, name: str, usual_s: float, most_s: float, function: Callable[..., Row], *arguments: Any) -> Row:
        """A row ``name`` with what ``function(*arguments)`` returns in a fresh process, or its ``error``; ``missing``
        where there is no time for what usually takes ``usual_s``."""
        if not self.time_for(usual_s):
            return {"name": name, "missing": NO_TIME}
        try:
            found = self.isolated(most_s, function, *arguments)
        except MeasurementError as error:
            report.progress(f"{name} failed:\n{error}")
            return {"name": name, "error": excerpt(str(error))}
        report.progress(f"{name}: {', '.join(f'{key} {value}' for key, value in found.items() if key != 'rows')}")
        return {"name": name, **found}

    def known(self, case: str, name: str) -> bool:
        """Returns whether an earlier command has found this."""
        rows = [row for row in self.rows if (row["case"], row["name"]) == (case, name)]
        return any(not {"error", "missing"} & row.keys() for row in rows)
