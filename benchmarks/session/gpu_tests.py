"""The parts ``first`` and ``tests``: the project's tests that need a GPU.

Each file runs in a process of its own, because a test may end it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from time import perf_counter

from benchmarks.isolate import excerpt
from benchmarks.report import progress
from benchmarks.session.record import NO_TIME, Row
from benchmarks.session.settings import LEAST_S, ROOT, Request

FIRST = "tests/device/test_on_a_gpu.py"
"""The file that is worth most: the device lane's own."""

_TOY = "tests/device/test_accelerator.py"
_MARK = "mark.gpu"
_AT_ONCE = 3
_EACH_S = 60.0
_NO_TESTS = 5  # pytest's status where none was selected
_KEPT = 6000  # characters of the end of what a file that failed has said


def first(request: Request) -> Iterator[Row]:
    """One file, whose tests say whether the device lane works here at all."""
    yield _row(request, _TOY if request.settings.quick else FIRST)


def tests(request: Request) -> Iterator[Row]:
    """All other files; what an earlier command has found to pass is not run again."""
    done = [name for name in files() if any(request.row(case, name) is not None for case in ("first", "tests"))]
    left = [] if request.settings.quick else [name for name in files() if name not in done]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for ready in as_completed([pool.submit(_row, request, name) for name in left]):
            yield ready.result()


def files() -> list[str]:
    """Files with tests that need a GPU."""
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if _MARK in path.read_text(encoding="utf-8")
    ]


def _row(request: Request, name: str) -> Row:
    """Runs a file; where there is a GPU nothing may be skipped."""
    if not request.time_for(LEAST_S):
        return {"name": name, "missing": NO_TIME}
    required = ["--require-gpu"] if request.settings.device == "cuda" else []
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu", "--all"]
    began = perf_counter()
    status, told = run([*command, *required, name], request.limit_s(_EACH_S))
    lines = told.strip().splitlines() or ["it said nothing"]
    row: Row = {
        "name": name,
        "passed": status in (0, _NO_TESTS),
        "summary": lines[-1],
        "took_s": perf_counter() - began,
    }
    progress(f"{name}: {lines[-1]}")
    if row["passed"]:
        return row
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {**row, "failed": failed, "error": f"{excerpt(told, _KEPT)}\n{ended(status)}"}


def ended(status: int | None) -> str:
    """How a command ended, in words. ``status``: as of ``subprocess``; None where it took too long."""
    if status is None:
        return "not through in time"
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def run(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """The status of a command, and all that it has said; None where it was ended for taking longer."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as told:
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        process = subprocess.Popen(command, cwd=ROOT, stdout=told, stderr=subprocess.STDOUT, env=environment)
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            process.kill()
            process.wait()
        told.seek(0)
        return status, told.read()
