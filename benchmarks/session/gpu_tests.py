"""The part ``tests``: the project's tests that need a GPU, the device lane's own first.

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
from benchmarks.session.settings import NO_TIME, ROOT, Request, Row

FIRST = "tests/device/test_on_a_gpu.py"
_TOY = "tests/device/test_accelerator.py"
_AT_ONCE = 3
_LEAST_S, _EACH_S = 5.0, 60.0
_NO_TESTS = 5  # pytest's status where none was selected
_KEPT = 6000  # characters of the end of what a file that failed has said


def tests(request: Request) -> Iterator[Row]:
    """A row for each file: whether it has ``passed``. Those that an earlier command has found to pass do not run."""
    first, *others = [_TOY] if request.settings.quick else files()
    if not request.known("tests", first):
        yield _row(request, first)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        left = [name for name in others if not request.known("tests", name)]
        for ready in as_completed([pool.submit(_row, request, name) for name in left]):
            yield ready.result()


def files() -> list[str]:
    """Files with tests that need a GPU; the one that is worth most first."""
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    return sorted((path.relative_to(ROOT).as_posix() for path in paths), key=lambda name: (name != FIRST, name))


def _row(request: Request, name: str) -> Row:
    """Runs a file; where there is a GPU nothing may be skipped."""
    if not request.time_for(_LEAST_S):
        return {"name": name, "missing": NO_TIME}
    required = ["--require-gpu"] if request.settings.device == "cuda" else []
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu", "--all"]
    began = perf_counter()
    ended, said = run([*command, *required, name], max(_LEAST_S, min(_EACH_S, request.deadline - began)))
    lines = said.strip().splitlines() or ["it said nothing"]
    progress(f"{name}: {lines[-1]}")
    passed = ended in ("status 0", f"status {_NO_TESTS}")
    row: Row = {"name": name, "passed": passed, "summary": lines[-1], "took_s": perf_counter() - began}
    return row if passed else {**row, "error": f"{excerpt(said, _KEPT)}\n{ended}"}


def run(command: Sequence[str], limit_s: float) -> tuple[str, str]:
    """How a command ended, in words, and all that it has said, also where it was ended for taking longer."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, env=environment, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            ended = "not through in time"
        else:
            status = done.returncode
            ended = f"ended by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        said.seek(0)
        return ended, said.read()
