"""Which tests execute the code of which faults: a run of tests with a counter before each fault's statement.

As a plugin of pytest (``-p``) this module writes a line for each test that was green.
"""

from __future__ import annotations

import ast
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.mutations.fault import Fault

_FOLDER, _FILE = "MUTATIONS_FOLDER", "MUTATIONS_COUNTERS"  # in the environment, which all processes of a test have
_SIZE = 4096
_CALL = '__import__("tests.mutations.reach", fromlist=["passed"]).passed({})'
_counters: mmap.mmap | None = None
_red: set[str] = set()


# --- in the processes of a test ----------------------------------------------------------------------------


def passed(number: int) -> None:
    """A fault's statement is about to be executed."""
    global _counters
    if _counters is None:
        with Path(os.environ[_FILE]).open("r+b") as file:
            _counters = mmap.mmap(file.fileno(), _SIZE)
    _counters[number] = 1


def pytest_configure() -> None:
    """Makes the counters."""
    path = Path(os.environ[_FOLDER], f"{os.getpid()}.counters")
    path.write_bytes(bytes(_SIZE))
    os.environ[_FILE] = str(path)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes what is red without any fault."""
    if report.failed:
        _red.add(report.nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Writes what a test has passed."""
    path = Path(os.environ[_FILE])
    with path.open("r+b") as file:
        file.write(bytes(_SIZE))
    yield
    if item.nodeid not in _red:
        found = [number for number, count in enumerate(path.read_bytes()) if count]
        with path.with_suffix(".jsonl").open("a") as lines:
            lines.write(json.dumps([item.nodeid.removeprefix("tests/"), found]) + "\n")


# --- in the program that tries faults ----------------------------------------------------------------------


def some_that_reach(
    tree: Path, faults: Sequence[Fault], tests: Sequence[str], most: int, processes: int
) -> dict[str, list[str]]:
    """Of each fault some of the tests that reach it, by its name, the same ones each time."""
    found = reached(tree, faults, tests, processes)
    return {name: random.Random(name).sample(each, min(most, len(each))) for name, each in found.items()}


def reached(tree: Path, faults: Sequence[Fault], tests: Sequence[str], processes: int) -> dict[str, list[str]]:
    """The tests that reach each fault, by its name. Runs the tests once in a tree, which is as it was after that.

    A fault that is executed as its module is imported is reached by every test.
    """
    texts = {path: path.read_text() for path in {fault.path(tree) for fault in faults}}
    places = [line_of(texts[fault.path(tree)], fault) for fault in faults]
    counters: dict[Path, list[tuple[int, int]]] = defaultdict(list)
    for number, (fault, line) in enumerate(zip(faults, places, strict=True)):
        if line is not None:
            counters[fault.path(tree)].append((line, number))
    try:
        for path, lines in counters.items():
            path.write_text(_with_counters(texts[path], lines))
        rows = _run(tree, tests, processes)
    finally:
        for path, text in texts.items():
            path.write_text(text)
    return {
        fault.name: sorted(test for test, found in rows if places[number] is None or number in found)
        for number, fault in enumerate(faults)
    }


def _with_counters(text: str, counters: list[tuple[int, int]]) -> str:
    lines = text.splitlines(keepends=True)
    for line, number in sorted(counters, reverse=True):
        before = lines[line - 1]
        indent = before[: len(before) - len(before.lstrip())]
        lines.insert(line - 1, f"{indent}{_CALL.format(number)}\n")
    return "".join(lines)


def _run(tree: Path, tests: Sequence[str], processes: int) -> list[tuple[str, list[int]]]:
    with tempfile.TemporaryDirectory(prefix="reached-") as folder:
        environment = {**os.environ, "PYTHONPATH": str(tree), _FOLDER: folder}
        options = ["-q", "-p", "no:cacheprovider", "-p", "tests.mutations.reach", "--numprocesses", str(processes)]
        command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
        subprocess.run(command, cwd=tree, env=environment, check=False, stdout=sys.stderr)
        return [json.loads(line) for file in Path(folder).glob("*.jsonl") for line in file.read_text().splitlines()]


def line_of(text: str, fault: Fault) -> int | None:
    """The line of the innermost statement of a function that the fault changes; None where it changes none."""
    at = text.index(fault.before)
    at += next(
        (n for n, (was, becomes) in enumerate(zip(fault.before, fault.after, strict=False)) if was != becomes),
        min(len(fault.before), len(fault.after)),
    )
    at += len(text[at:]) - len(text[at:].lstrip())
    changed, lines, found = text.count("\n", 0, at) + 1, text.splitlines(), None
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if (
                node is function
                or not isinstance(node, ast.stmt)
                or not node.lineno <= changed <= (node.end_lineno or 0)
            ):
                continue
            first = not lines[node.lineno - 1][: node.col_offset].strip()
            if first and not lines[node.lineno - 1].lstrip().startswith("elif") and node.lineno >= (found or 0):
                found = node.lineno
    return found
