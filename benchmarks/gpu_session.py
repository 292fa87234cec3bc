"""What a GPU machine is needed for, in one go: ``python -m benchmarks.gpu_session``.

Parts run one after another, each in a process of its own with a time limit; the document is written after each of them,
so that what is known stays known. ``--part`` runs some of them and keeps what the document has of the others, where it
is of the same commit. Correctness comes first: what only a GPU can decide, the tests that need one, the parity of every
pipeline, then figures:

    checks   = questions with two answers, and what each means for the project (``session/checks.py``)
    tune     = the peers' settings: PyTorch and SPDL with GPU transforms, DALI with mixed decoding
    rates    = photographs, decoded, cropped, normalised, without a step: all-CPU, all-device, hybrid, peers; samples/s
    training = the same with a step of ResNet-50; step_s on the device, and resident_step_s on batches that lay there
    light    = the same with small photographs, for which the CPU lane should suffice
    memory   = the device's memory that a loader takes, without and with a budget
    price    = the step against the share of time that the device lane works
    thread   = what ``next`` takes of the training thread when its batch lies ready, and for how long the interpreter is
               taken from it while it computes

``targets`` in the document says what was to be reached and what was. The photographs are made once, in ``--data``.
Without a GPU the same code runs against the CPU stand-ins, which shows that it works; its figures mean nothing.
"""

from __future__ import annotations

import gc
import importlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch

from benchmarks import report
from benchmarks.isolate import MeasurementError, isolated
from benchmarks.report import progress
from benchmarks.session import checks, harm, parts
from benchmarks.session.about import ROOT, default_path, described, joinable
from benchmarks.session.parts import Asked, Rows
from benchmarks.session.settings import Settings
from benchmarks.session.targets import targets
from minato_gpu import parity
from minato_gpu.demo.photographs import make
from minato_gpu.report import write as write_json
from pipelines import image_classification

MODULES = ("image_classification", "segmentation_3d", "object_detection", "speech_recognition")
_COLUMNS = (
    "case",
    "name",
    "passed",
    "holds",
    "samples_per_s",
    "samples_per_s_spread",
    "step_s",
    "step_slowdown",
    "device_bytes_peak",
    "device_share",
    "step_s_per_device_s",
    "next_p99_s",
    "pause_p99_s",
    "missing",
    "error",
)
_TARGET_COLUMNS = ("name", "case", "measured", "relation", "target", "met", "best_peer", "bottleneck", "why")


@dataclass(frozen=True)
class Part:
    """``limit_s``: after so long it is ended; what can be repeated is not begun again where it would not fit."""

    run: Callable[[Asked], Rows]
    limit_s: float


# --- correctness -------------------------------------------------------------------------------------------------


def tests(asked: Asked) -> Rows:
    """``pytest -m gpu``; where there is a GPU nothing may be skipped. At toy size one file, to show that it works."""
    required = ["--require-gpu"] if asked.settings.device == "cuda" else []
    which = ["tests/memory/test_nvml.py"] if asked.settings.quick else []
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-m", "gpu", "--all", *required, *which]
    status, said = _run(command, asked.deadline - perf_counter())
    lines = said.strip().splitlines() or ["it said nothing"]
    row = {"name": "pytest -m gpu", "passed": status == 0, "summary": lines[-1]}
    if row["passed"]:
        return [row]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    why = f"not through after {-status:.0f} s\n" if status < 0 else ""
    return [{**row, "failed": failed, "error": why + said[-12000:]}]


def _run(command: Sequence[str], limit_s: float) -> tuple[int | float, str]:
    """The status of a command, and all that it has said; the negative limit where it was ended for taking longer."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            status: int | float = process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            status = -max(1.0, limit_s)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        return status, said.read()


def check(asked: Asked) -> Rows:
    """Every stage of every pipeline, on its module's example data. One that cannot be checked hides no other."""
    return [_checked(asked, module) for module in MODULES[: 1 if asked.settings.quick else None]]


def _checked(asked: Asked, module: str) -> dict[str, Any]:
    limit_s = asked.limit_s(150.0)
    try:
        found = isolated(parity.run_check, f"pipelines.{module}", None, asked.settings.device, timeout_s=limit_s)
    except MeasurementError as error:
        progress(f"parity of {module} failed:\n{error}")
        return {"name": module, "passed": False, "error": str(error)[-2000:]}
    worst = [row["stage"] for row in found.rows if not row["passed"]]
    return {"name": module, "passed": found.passed, "stages_failed": worst, "rows": found.rows}


PARTS: dict[str, Part] = {
    "checks": Part(checks.checks, 180.0),
    "tests": Part(tests, 240.0),
    "parity": Part(check, 120.0),
    "tune": Part(parts.tune, 170.0),
    "rates": Part(parts.rates, 220.0),
    "training": Part(parts.training, 260.0),
    "light": Part(parts.light, 190.0),
    "memory": Part(parts.memory, 60.0),
    "price": Part(harm.price, 100.0),
    "thread": Part(harm.thread, 140.0),
}
"""In the order in which they run. The limits together make less than 30 minutes; each leaves room in ``COMMAND_S`` for
what a command does before its first part."""

COMMAND_S = 500.0
PHOTOGRAPHS_S = 150.0
"""How long one command may take where a machine is lent, and the photographs in it."""


# --- the session -------------------------------------------------------------------------------------------------


def session(settings: Settings, names: Sequence[str], path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Run the parts; the document at ``path`` is whole after each. A part that fails or takes too long is a row.

    ``about``: the document's other keys (see ``described``). What the document has of other parts already is kept.
    """
    rows: Rows = [row for row in joinable(path, about) or [] if row["case"] not in names]
    content: dict[str, Any] = {}
    for name in names:
        progress(f"{name} ...")
        began = perf_counter()
        rows += [{"case": name, **row} for row in _part(name, settings, rows)]
        progress(f"{name}: {perf_counter() - began:.0f} s")
        rows.sort(key=lambda row: list(PARTS).index(row["case"]))
        ended = datetime.now(UTC).isoformat()
        content = {**about, "ended": ended, "rows": rows, "targets": targets(rows)}
        write_json(content, path)
    return content


def _part(name: str, settings: Settings, rows: Rows) -> Rows:
    try:
        return isolated(
            _within,
            name,
            settings,
            rows,
            timeout_s=PARTS[name].limit_s,
            settle_s=settings.settle_s,
            grace_s=10.0,
            quiet=False,
        )
    except MeasurementError as error:
        progress(f"{name} failed:\n{error}")
        return [{"name": name, "passed": False, "error": str(error)[-2000:]}]


def _within(name: str, settings: Settings, rows: Rows) -> Rows:
    """A part, in its process. Asked to end, it unwinds, so that no measurement of its own is left running."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return PARTS[name].run(Asked(settings, rows, perf_counter() + 0.9 * PARTS[name].limit_s))


def _photographs(folder: Path, count: int) -> None:
    """Make them, or find them made; toys where none are counted."""
    if count:
        make(folder, count, 0)
    elif not folder.exists():
        image_classification.example_data(folder)


def _preload(device: str) -> None:
    """Import once what every run would import for itself, as far as that does not ask CUDA.

    An optimizer imports SymPy, which takes a second.
    """
    names = ["sympy"]
    if device == "cpu":
        names += ["torch._dynamo", "nvidia.dali.fn", "nvidia.dali.plugin.pytorch", "spdl.pipeline"]
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # every fork looks for garbage before it begins: not among all that


def _usual_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="The GPU where there is one, if not given.")
@click.option("--part", "names", multiple=True, type=click.Choice(list(PARTS)), help="Only this part; repeatable.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the document goes.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Where the photographs are, or go.")
@click.option("--commit", help="What is measured, where that is not a git checkout.")
@click.option("--quick", is_flag=True, help="Toy size: shows that it works; the figures mean nothing.")
def main(
    device: str | None, names: tuple[str, ...], out: Path | None, data: Path | None, commit: str | None, quick: bool
) -> None:
    """See the module's head."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    device = device or isolated(_usual_device, settle_s=0.0)  # who asks CUDA can fork no more
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="minato_gpu_session_")) if quick else None
        folder = data or Path(scratch or tempfile.gettempdir()) / "minato_gpu_session_photographs"
        settings = Settings.usual(device, folder, quick=quick)
        about = isolated(described, settings, commit, settle_s=0.0)
        isolated(_photographs, folder, settings.photographs, timeout_s=PHOTOGRAPHS_S, settle_s=0.0)
        path = out or default_path(settings, about)
        _preload(device)
        content = session(settings, [name for name in PARTS if not names or name in names], path, about)
    report.print_table("gpu session", content["rows"], _COLUMNS)
    report.print_table("targets", content["targets"], _TARGET_COLUMNS)
    progress(f"written to {path}")
    if any(row.get("passed") is False or "error" in row for row in content["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
