"""What a session's document says of itself, and where it lies."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.session.settings import Settings

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
