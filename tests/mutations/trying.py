"""Runs the suite on a copy of the tree that has one fault, and tells which test noticed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import NamedTuple

from tests.mutations.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".torch", "runs", "build", ".mypy_cache", ".ruff_cache", "results")
_NOTICED = re.compile(r"^(?:FAILED|ERROR) (\S+.*?)(?: - .*)?$", re.MULTILINE)
_NOTHING_RAN = 5  # pytest's status where no test was selected
_TEST_S = 30  # a fault may make a test wait for ever


class Result(NamedTuple):
    """``caught_by``: the first test that failed, None if none did."""

    fault: Fault
    caught_by: str | None
    seconds: float


def copied(target: Path) -> Path:
    """A copy of the working tree, without what is made from it."""
    shutil.copytree(ROOT, target, symlinks=True, ignore=_LEFT_OUT)
    return target


def pytest_here(tree: Path, arguments: Sequence[str], limit_s: float) -> str | None:
    """Run pytest in the tree; returns the first test that failed, or what else went wrong; None if nothing did, or if
    the run took longer than the limit: a test that waits for ever fails by its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ["-x", "-q", "-rfE", "--hypothesis-profile=first", f"--timeout={_TEST_S}", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    program = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        said, _ = program.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()
        return None
    found = _NOTICED.search(said)
    if found is not None:
        return found[1]
    if program.returncode not in (0, _NOTHING_RAN):
        return f"pytest's status {program.returncode}: {said[-300:]}"
    return None


def tried(fault: Fault, tree: Path, *, only: Sequence[str] = (), whole: bool, limit_s: float) -> Result:
    """Run the tests that are likely to notice the fault (or ``only`` these) and, with ``whole``, then all others."""
    begin = perf_counter()
    path = fault.path(tree)
    text = path.read_text()
    fault.apply(tree)
    try:
        caught = None
        for file in only or fault.likely:
            caught = caught or pytest_here(tree, [f"tests/{file}"], limit_s)
        if caught is None and whole:
            caught = pytest_here(tree, ["--numprocesses", "2", "--dist", "worksteal"], 10 * limit_s)
    finally:
        path.write_text(text)
    return Result(fault, caught, perf_counter() - begin)


def try_all(
    faults: Sequence[Fault],
    trees: Sequence[Path],
    told: Callable[[Result], None],
    *,
    only: Sequence[str] = (),
    whole: bool,
    limit_s: float,
) -> None:
    """Try the faults, as many at once as there are trees."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(fault: Fault) -> None:
        tree = free.get()
        try:
            told(tried(fault, tree, only=only, whole=whole, limit_s=limit_s))
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        for _ in pool.map(one, faults):
            pass
