"""How large a session is, what its document says of itself and where it lies, and a request for one of its parts."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

from benchmarks import report
from benchmarks.isolate import isolated
from minato_gpu.threads import usable_cores


@dataclass(frozen=True)
class Settings:
    """``device``: "cuda" or "cpu" (the stand-ins). ``quick``: toy size. ``folder``: class folders of photographs.

    A run of a loader takes ``resident_s`` for steps on resident batches (where there are steps), then ``warm_s`` from
    its first batch on, until it has settled, and ``timed_s`` that count, however slow it is; a try of a setting is
    timed for ``tried_s``. Where a device lane is still opening after ``warm_s``, the run waits until it is at work, for
    at most ``opening_s`` from its first batch on. ``settle_s``: the pause between two runs. ``cores``: how many of this
    machine's a run may use; 0: all.
    """

    device: str
    quick: bool
    folder: Path
    workers: int
    repetitions: int
    photographs: int
    batch: int
    size: int
    classes: int
    resident_s: float
    warm_s: float
    opening_s: float
    timed_s: float
    tried_s: float
    settle_s: float
    cores: int = 0

    @classmethod
    def usual(cls, device: str, folder: Path, *, quick: bool) -> Settings:
        """The size of a real run, or of a toy."""
        if quick:
            return cls(
                device,
                quick,
                folder,
                workers=1,
                repetitions=1,
                photographs=0,
                batch=4,
                size=32,
                classes=16,
                resident_s=0.02,
                warm_s=0.02,
                opening_s=0.0,
                timed_s=0.04,
                tried_s=0.02,
                settle_s=0.0,
            )
        return cls(
            device,
            quick,
            folder,
            workers=max(1, usable_cores() - 2),
            repetitions=5,
            photographs=2000,
            batch=256,
            size=224,
            classes=1000,
            resident_s=1.0,
            warm_s=3.0,
            opening_s=15.0,  # importing DALI and building graphs took 4 to 7 s on an H200
            timed_s=3.0,
            tried_s=2.0,
            settle_s=0.3,
        )

    def on_cores(self, count: int) -> Settings:
        """The same on so many cores."""
        return replace(self, cores=count, workers=max(1, count - 2))

    def told(self) -> dict[str, Any]:
        """All of them but the path, which is this machine's own affair."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


# --- the document's head ----------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]


def described(settings: Settings, commit: str | None) -> dict[str, Any]:
    """All of the document but its rows. It asks CUDA: not in a process that forks others afterwards."""
    on_gpu = settings.device == "cuda"
    about = {
        "commit": commit or _said("git", "rev-parse", "HEAD"),
        "driver": _driver() if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
    }
    content = report.document("gpu_session", {**settings.told(), **about}, [])
    del content["rows"]
    return content


def _driver() -> str | None:
    """The driver's version."""
    file = Path("/sys/module/nvidia/version")
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _said(*command: str) -> str | None:
    """The first line of what a command says; None where there is no such command, or nothing to say."""
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(found.stdout.strip().splitlines()), None)


def outside() -> Path:
    """The folder for what a session makes: not in the tree, which it measures, and which may be a copy that is thrown
    away. A machine that is lent names in OUT what it gives back."""
    return Path(os.environ.get("OUT") or tempfile.gettempdir()) / "minato_gpu_session"


def default_path(settings: Settings, about: Mapping[str, Any]) -> Path:
    """By GPU and date, to be put under ``benchmarks/results/``; another name for stand-ins and toys."""
    if settings.device != "cuda" or settings.quick:
        return outside() / "stand-in.json"
    name = str(about["machine"]["gpus"][0]).lower().replace(" ", "-")
    return free(outside() / name / f"{datetime.now(UTC):%Y-%m-%d}.json")


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Names of what keeps figures of two commands apart: settings (commit and driver among them), or the GPUs."""
    names = theirs["settings"].keys() | ours["settings"].keys()
    found = [name for name in sorted(names) if theirs["settings"].get(name) != ours["settings"].get(name)]
    return [*found, *(["gpus"] if theirs["machine"]["gpus"] != ours["machine"]["gpus"] else [])]


def free(path: Path) -> Path:
    """The path, or one beside it where there is a document already."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_stem(f"{path.stem}-{number}")
    return found


# --- a request for a part ---------------------------------------------------------------------------------------------


Result = TypeVar("Result")

LEAST_S = 5.0  # what whoever comes last may take: between a part's deadline and its limit there is time for one


@dataclass(frozen=True)
class Request:
    """``rows``: those of the parts before it, and its own of an earlier command; ``deadline``: by ``perf_counter``."""

    settings: Settings
    rows: Sequence[Mapping[str, Any]]
    deadline: float

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, which may have passed."""
        return self.deadline - perf_counter()

    def time_for(self, seconds: float) -> bool:
        """Whether something that takes so long is through in time."""
        return seconds < self.left_s

    def limit_s(self, seconds: float) -> float:
        """How long something may take that would be given so long."""
        return max(LEAST_S, min(seconds, self.left_s))

    def isolated(self, most_s: float, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of ``function(*arguments)`` in a fresh process, for which there are ``most_s`` seconds, or those
        that are left. Raises MeasurementError."""
        return isolated(function, *arguments, timeout_s=self.limit_s(most_s), settle_s=self.settings.settle_s)

    def row(self, case: str, name: str) -> Mapping[str, Any] | None:
        """What is known already, if that is an answer."""
        found = [row for row in self.rows if (row.get("case"), row.get("name")) == (case, name)]
        return found[-1] if found and not {"error", "missing"} & found[-1].keys() else None


# --- what may differ between two candidates of a kind -----------------------------------------------------------------


_SAME = ("name", "package", "ordered", "own_draws", "size")


def settings_of(candidate: Any) -> dict[str, Any]:
    """The fields of a candidate (a dataclass) that are settings."""
    return {name: value for name, value in asdict(candidate).items() if name not in _SAME}
