"""P7 from outside: Ctrl-C, kill -9 of the parent, sys.exit. The workers must be gone, whatever they were doing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.contracts.modes import BOUNDED_8, IN_ORDER, IN_ORDER_THREADS, PYTORCH, Mode
from tests.support.leaks import gone
from tests.support.programs import Program
from tests.support.waiting import wait_until


def str_of(value: object) -> str:
    """A readable id for a parameter."""
    if isinstance(value, bool):
        return "whole group" if value else "parent alone"
    return value.name if isinstance(value, Mode) else str(value)


@contextmanager
def _victim(scenario: str, mode: Mode) -> Iterator[tuple[Program, list[psutil.Process]]]:
    """The running program and its workers; whatever is left of them is killed at the end."""
    process = Program("tests.contracts.victim", scenario, mode.name)
    workers: list[psutil.Process] = []
    try:
        line = process.stdout.readline()
        for pid in line.split():
            with suppress(psutil.NoSuchProcess):
                workers.append(psutil.Process(int(pid)))
        assert line.endswith("\n"), "the program ended before its workers were at work"
        assert len(line.split()) >= (2 if mode.processes else 0)
        yield process, workers
    finally:
        process.kill()
        for worker in workers:
            if worker.is_running():
                worker.kill()
        process.close()


def _gone(workers: list[psutil.Process]) -> bool:
    return all(gone(worker.pid) for worker in workers)


def _left(pid: int) -> list[str]:
    """Entries of shared memory that carry the id of a process in their name."""
    return [entry.name for entry in Path("/dev/shm").iterdir() if str(pid) in entry.name]


@pytest.mark.parametrize(
    ("mode", "scenario"),
    [
        (PYTORCH, "idle"),  # not "waiting": its workers look for their parent between samples only
        (IN_ORDER, "endless_loop"),
        (IN_ORDER, "waiting"),
        (IN_ORDER, "idle"),
        (BOUNDED_8, "waiting"),
    ],
    ids=str_of,
)
def test_kill_of_the_parent(mode: Mode, scenario: str) -> None:
    with _victim(scenario, mode) as (process, workers):
        process.kill()
        process.wait()
        assert wait_until(lambda: _gone(workers))
        assert _left(process.pid) == []


def test_kill_of_a_parent_that_has_forked() -> None:
    with _victim("forks", IN_ORDER) as (process, workers):
        child = psutil.Process(int(process.stdout.readline()))
        try:
            process.kill()
            process.wait()
            assert wait_until(lambda: _gone(workers))
            assert not gone(child.pid)
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("mode", "scenario", "whole_group"),
    [
        (PYTORCH, "endless_loop", True),
        (IN_ORDER, "endless_loop", True),
        (IN_ORDER, "endless_loop", False),
        (IN_ORDER, "waiting", True),
        (IN_ORDER, "waiting", False),
        (BOUNDED_8, "waiting", False),
        (IN_ORDER_THREADS, "endless_loop", False),
        (IN_ORDER_THREADS, "waiting", False),
    ],
    ids=str_of,
)
def test_interrupt(mode: Mode, scenario: str, whole_group: bool) -> None:
    """Ctrl-C reaches the whole foreground group; a signal from a scheduler only the parent."""
    with _victim(scenario, mode) as (process, workers):
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        assert wait_until(lambda: process.poll() is not None)
        assert wait_until(lambda: _gone(workers))
        errors = process.stderr.read()
        assert process.returncode in (-signal.SIGINT, 1, 130), errors
        assert errors.count("KeyboardInterrupt") == 1 or mode is PYTORCH, errors
        assert errors.count("Traceback") <= 1 or mode is PYTORCH, errors


@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8, IN_ORDER_THREADS], ids=str_of)
def test_interrupt_that_is_handled(mode: Mode) -> None:
    """The program catches Ctrl-C, nothing is left, and a new epoch is whole."""
    with _victim("survives", mode) as (process, workers):
        os.kill(process.pid, signal.SIGINT)
        output, errors = process.communicate()
        assert (process.returncode, output.strip()) == (0, "whole"), errors
        assert _gone(workers)


@pytest.mark.parametrize("scenario", ["saves", "saves_replacing"])
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8, IN_ORDER_THREADS], ids=str_of)
def test_sigterm_to_the_whole_job_that_is_handled(mode: Mode, scenario: str) -> None:
    """Schedulers send it to all processes: the program's own handler decides when they end. PyTorch's workers end."""
    with _victim(scenario, mode) as (process, workers):
        os.killpg(process.pid, signal.SIGTERM)
        output, errors = process.communicate()
        assert (process.returncode, output.strip(), errors) == (0, "saved", "")
        assert _gone(workers)


@pytest.mark.parametrize("mode", [IN_ORDER, IN_ORDER_THREADS], ids=str_of)
def test_sigterm_to_the_whole_job_that_is_not_handled(mode: Mode) -> None:
    with _victim("waiting", mode) as (process, workers):
        os.killpg(process.pid, signal.SIGTERM)
        assert wait_until(lambda: process.poll() is not None and _gone(workers))
        assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("scenario", ["exits", "exits_as_a_child"])
@pytest.mark.parametrize("mode", [PYTORCH, IN_ORDER, IN_ORDER_THREADS], ids=str_of)
def test_exit_with_workers_alive(mode: Mode, scenario: str) -> None:
    with _victim(scenario, mode) as (process, workers):
        output, errors = process.communicate()
        assert (process.returncode, output, errors) == (3, "", "")
        assert wait_until(lambda: _gone(workers))
        assert _left(process.pid) == []
