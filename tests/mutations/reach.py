"""Which tests execute the code of which faults: a run of the tests with a counter before each fault's statement.

A fault that stands in a class or a module counts as reached by every test. As a plugin of pytest (``-p``) this module
writes a line for each test.
"""

from __future__ import annotations

import ast
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mutations.fault import Fault

_FILE = "MUTATIONS_REACHED"  # the environment's name of the file of counters
_SIZE = 4096
_FOLDER = "MUTATIONS_REACHED_FOLDER"
_counters: mmap.mmap | None = None
_red: set[str] = set()


def passed(number: int) -> None:
    """A fault's statement is about to be executed, in whichever process."""
    global _counters
    if _counters is None:
        with open(os.environ[_FILE], "r+b") as file:
            _counters = mmap.mmap(file.fileno(), _SIZE)
    _counters[number] = 1


def pytest_configure(config: pytest.Config) -> None:
    """Makes the counters, which child processes find by the environment."""
    path = Path(os.environ[_FOLDER], f"{os.getpid()}.counters")
    path.write_bytes(bytes(_SIZE))
    os.environ[_FILE] = str(path)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes what is red without any fault: it shows nothing."""
    if report.failed:
        _red.add(report.nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Writes what a test has passed."""
    path = Path(os.environ[_FILE])
    with path.open("r+b") as file:
        file.write(bytes(_SIZE))
    yield
    found = [number for number, count in enumerate(path.read_bytes()) if count] if item.nodeid not in _red else []
    with path.with_suffix(".jsonl").open("a") as lines:
        lines.write(json.dumps([item.nodeid, found]) + "\n")


def reached(tree: Path, faults: Sequence[Fault], tests: Sequence[str], processes: int = 2) -> dict[str, list[str]]:
    """The tests that reach each fault, by its name; runs the tests once in a tree, which is put right after it."""
    by_file: dict[Path, list[int]] = defaultdict(list)
    for number, fault in enumerate(faults):
        by_file[fault.path(tree)].append(number)
    texts = {path: path.read_text() for path in by_file}
    everywhere: set[int] = set()
    for path, numbers in by_file.items():
        places = {number: _line(texts[path], faults[number]) for number in numbers}
        everywhere |= {number for number, line in places.items() if line is None}
        lines = texts[path].splitlines(keepends=True)
        for number, line in sorted(places.items(), key=lambda place: -(place[1] or 0)):
            if line is not None:
                indent = " " * (len(lines[line - 1]) - len(lines[line - 1].lstrip()))
                call = f'__import__("tests.mutations.reach", fromlist=["passed"]).passed({number})'
                lines.insert(line - 1, f"{indent}{call}\n")
        path.write_text("".join(lines))
    try:
        rows = _run(tree, tests, processes)
    finally:
        for path, text in texts.items():
            path.write_text(text)
    return {
        fault.name: [test for test, found in rows if number in found or number in everywhere]
        for number, fault in enumerate(faults)
    }


def _run(tree: Path, tests: Sequence[str], processes: int) -> list[tuple[str, list[int]]]:
    with tempfile.TemporaryDirectory(prefix="reached-") as folder:
        environment = {**os.environ, "PYTHONPATH": str(tree), _FOLDER: folder}
        options = ["-q", "-p", "no:cacheprovider", "-p", "tests.mutations.reach", "-n", str(processes)]
        command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
        subprocess.run(command, cwd=tree, env=environment, check=False, stdout=sys.stderr)
        rows = [json.loads(line) for file in sorted(Path(folder).glob("*.jsonl")) for line in file.open()]
    return [(test, found) for test, found in rows]


def _line(text: str, fault: Fault) -> int | None:
    """The line of the innermost statement that the fault changes; None where it is executed by an import."""
    at = text.index(fault.before) + len(os.path.commonprefix([fault.before, fault.after]))
    at += len(text[at:]) - len(text[at:].lstrip())
    line = text.count("\n", 0, at) + 1
    found: int | None = None
    lines = text.splitlines()

    def look(node: Any, inside: bool) -> None:
        nonlocal found
        for child in ast.iter_child_nodes(node):
            begin, end = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
            if begin is None or end is None:
                look(child, inside)
                continue
            if not begin <= line <= end:
                continue
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            first = lines[begin - 1][: child.col_offset].strip() == "" and not lines[begin - 1].lstrip().startswith(
                "elif"
            )
            if inside and isinstance(child, ast.stmt) and first and not function:
                found = begin
            if function and not inside:
                found = child.body[0].lineno if line < child.body[0].lineno else found
            look(child, inside or function)

    look(ast.parse(text), False)
    return found
