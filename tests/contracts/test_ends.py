"""P7: however an epoch, a program or its parent ends, nothing stays. What cases leave is looked at in the table."""

from __future__ import annotations

import gc
import os
import re
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader
from tests.contracts.datasets import Costly, Made, Sourced
from tests.contracts.modes import BOUNDED_8, BOUNDED_8_THREADS, IN_ORDER, IN_ORDER_THREADS, PYTORCH, Mode
from tests.support.concurrency import said_by_a_child
from tests.support.leaks import check_scenario, child_pids, gone
from tests.support.programs import Program
from tests.support.waiting import wait_until


def _loader_dies_before_its_iterator(mode: Mode, **kept: Any) -> None:
    loader = mode.loader(Costly(40), 4, num_workers=2, **kept)
    iterator = iter(loader)
    next(iterator)
    del loader
    assert len(list(iterator)) == 9


def _garbage_in_a_reference_cycle(mode: Mode, **kept: Any) -> None:
    iterator = iter(mode.loader(Costly(400), 4, num_workers=2, **kept))
    next(iterator)
    cycle: list[Any] = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    gc.collect()


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
@pytest.mark.parametrize("scenario", [_loader_dies_before_its_iterator, _garbage_in_a_reference_cycle])
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8, BOUNDED_8_THREADS], ids=lambda mode: mode.name)
def test_nothing_stays(mode: Mode, scenario: Callable[..., None], persistent: bool) -> None:
    check_scenario(lambda: scenario(mode, persistent_workers=persistent), limit_s=4.0)


def test_without_workers_a_stream_ends_with_its_iterator() -> None:
    """The loader does not hold on to it."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            samples = (number for number in range(12))
            opened.append(weakref.ref(samples))
            return samples

    opened: list[Any] = []
    loader = DataLoader(Stream(), 4)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    del iterator
    assert opened[0]() is None
    assert loader.stats()["samples_delivered"] == 4


# --- programs that end in rude ways ----------------------------------------------------------------------------------


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
    """Entries of shared memory that have the id of a process as a part of their name, as torch names them."""
    return [entry.name for entry in Path("/dev/shm").iterdir() if str(pid) in entry.name.split("_")]


@pytest.mark.parametrize(
    ("mode", "scenario"),
    [
        (PYTORCH, "idle"),  # not "waiting": its workers look for their parent between samples only
        (IN_ORDER, "endless_loop"),
        (IN_ORDER, "waiting"),
        (IN_ORDER, "idle"),
        (BOUNDED_8, "waiting"),
        (IN_ORDER, "forks"),
    ],
    ids=str_of,
)
def test_kill_of_the_parent(mode: Mode, scenario: str) -> None:
    """What it has forked itself goes on."""
    with _victim(scenario, mode) as (process, workers):
        children = [psutil.Process(int(process.stdout.readline()))] if scenario == "forks" else []
        process.kill()
        process.wait()
        try:
            assert wait_until(lambda: _gone(workers))
            assert _left(process.pid) == []
            assert not any(gone(child.pid) for child in children)
        finally:
            for child in children:
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


class KeepsItsIterator(DataLoader[Any]):
    """As timm's MultiEpochsDataLoader and Ultralytics' InfiniteDataLoader do."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        yield from self.iterator


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("kept", [{}, {"persistent_workers": True}, {"epochs": 2}], ids=str)
def test_workers_of_a_loader_that_keeps_its_iterator_go_with_it(kept: dict[str, Any]) -> None:
    """No garbage collection is needed."""
    before = set(child_pids())
    loader = KeepsItsIterator(Made(40, int), 4, num_workers=2, **kept)
    gc.disable()
    try:
        next(iter(loader))
        workers = set(child_pids()) - before
        assert len(workers) == 2
        del loader
        assert wait_until(lambda: not workers & set(child_pids()))
    finally:
        gc.enable()


# --- a process that a program forks has workers of its own, and leaves those of its parent alone -------------------

SAMPLES = 40
WHOLE = list(range(SAMPLES))


def _keys(batches: Any) -> list[int]:
    return sorted(int(key) for batch in batches for key in batch)


_KINDS: dict[str, dict[str, Any]] = {
    "persistent": {"persistent_workers": True},
    "epochs": {"epochs": 5},
    "read ahead": {"persistent_workers": True, "cache": "1MB"},
    "replaced": {"persistent_workers": True, "on_worker_death": "replace"},
    "left at the end": {},
}


@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8, IN_ORDER_THREADS], ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_child_has_an_iterator_of_its_own(mode: Mode, kind: str) -> None:
    """Two processes that read the same answers would both wait for what the other has got."""
    data = Sourced(SAMPLES, torch.tensor) if kind == "read ahead" else Made(SAMPLES, torch.tensor)
    loader = mode.loader(data, 4, num_workers=2, **_KINDS[kind])
    iterator = iter(loader)
    head = [next(iterator)]
    error = said_by_a_child(lambda: next(iterator))
    assert isinstance(error, RuntimeError)
    assert re.fullmatch(rf"this iterator, and its workers, are those of process {os.getpid()}, from .*", str(error))
    assert said_by_a_child(lambda: [loader.stats()["samples_delivered"], loader.state_dict()["epoch"]]) == [4, 0]
    assert said_by_a_child(lambda: [_keys(loader), _keys(loader)]) == [WHOLE] * 2
    assert _keys([*head, *iterator]) == WHOLE
    assert _keys(loader) == WHOLE
