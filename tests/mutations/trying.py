"""Runs the suite on a copy of the tree that has one fault, and tells which test noticed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".torch", "runs", "build", ".mypy_cache", ".ruff_cache", "results")
_NOTICED = re.compile(r"^(?:FAILED|ERROR) (\S+.*?)(?: - .*)?$", re.MULTILINE)
_NOTHING_RAN = 5  # pytest's status where no test was selected
_TEST_S = 30  # a fault may make a test wait for ever
_FILE_S = 600  # for each file of tests


def copied(target: Path) -> Path:
    """A copy of the working tree, without what is made from it."""
    shutil.copytree(ROOT, target, symlinks=True, ignore=_LEFT_OUT)
    return target


def caught_by(fault: Fault, tree: Path, only: Sequence[str] = ()) -> str | None:
    """Put the fault into the tree for a while, and run the tests that are likely to notice it, or ``only`` these.

    Returns the first test that failed, None if none did.
    """
    path = fault.path(tree)
    text = path.read_text()
    fault.apply(tree)
    try:
        found = (_failed(tree, f"tests/{file}") for file in only or fault.likely)
        return next(filter(None, found), None)
    finally:
        path.write_text(text)


def _failed(tree: Path, test: str) -> str | None:
    """Run pytest in the tree; returns the first test that failed, or what else went wrong; None if nothing did, or if
    the run took longer than the limit: a test that waits for ever fails by its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ["-x", "-q", "-rfE", "--hypothesis-profile=first", f"--timeout={_TEST_S}", "-p", "no:cacheprovider"]
    program = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, test],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        said, _ = program.communicate(timeout=_FILE_S)
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
