"""Where the system gives less: a limit of address space, no descriptors of processes, no exit codes."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.lanes.processes import WorkerDied
from tests.contracts.datasets import Deadly, Made, Sourced
from tests.support import programs
from tests.support.concurrency import said_by_a_child
from tests.support.raising import error_of

_ROOM = 7 << 30  # of 8 GiB, torch itself takes some
_CACHE = "64MB"


def _made(key: int) -> Any:
    return torch.full((1000,), key)


def _limited(work: Callable[[], Any]) -> Any:
    def child() -> Any:
        gc.collect()  # arenas of tests before this one: unmapped under the limit, they would make room
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return work()

    return said_by_a_child(child)


_SETTINGS: dict[str, dict[str, Any]] = {
    "workers": {"num_workers": 2},
    "many workers": {"num_workers": 16},
    "threads": {"num_workers": 2, "worker_kind": "thread"},
    "cache": {"num_workers": 2, "cache": _CACHE},
    "both": {"num_workers": 2, "cache": {"memory": _CACHE, "disk": _CACHE}, "cache_dir": True},
}


@pytest.mark.parametrize("setting", _SETTINGS)
def test_a_loader_leaves_room(setting: str, tmp_path: Path) -> None:
    more = dict(_SETTINGS[setting])
    if more.get("cache_dir"):
        more["cache_dir"] = tmp_path

    def work() -> Any:
        loader: Any = DataLoader(Sourced(40, _made), 4, **more)
        iterator = iter(loader)
        first = next(iterator)
        mmap.mmap(-1, _ROOM // 8).close()  # what a program may want meanwhile
        heads = [int(row[0]) for batch in (first, *iterator, *loader) for row in batch]
        return heads, loader.stats()["reads"]["process"]

    assert _limited(work) == ([*range(40)] * 2, "runs")


def test_a_cache_for_which_there_is_no_room() -> None:
    error = _limited(lambda: iter(DataLoader(Sourced(40, _made), 4, num_workers=2, cache="20GB")))
    assert isinstance(error, OSError)
    assert "the cache keeps 20000000000 bytes in memory" in str(error) and "ulimit -v" in str(error)


# --- Linux before 5.3, sandboxes: pipes tell of a death --------------------------------------------------------------


@pytest.fixture(params=["EPERM", "ENOSYS", "missing"])
def no_pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by a sandbox, not there, or unknown to this Python."""
    if request.param == "missing":
        monkeypatch.delattr(os, "pidfd_open")
        return
    number = getattr(errno, request.param)

    def refused(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refused)


@pytest.mark.usefixtures("no_pidfd")
@pytest.mark.parametrize(("kind", "persistent"), [("process", False), ("process", True), ("thread", False)])
def test_epochs_without_descriptors_of_processes(kind: Any, persistent: bool) -> None:
    loader: Any = DataLoader(
        Sourced(20, torch.tensor), 4, num_workers=2, worker_kind=kind, persistent_workers=persistent, cache="1MB"
    )
    for _ in range(2):
        assert [int(key) for batch in loader for key in batch] == list(range(20))
    assert loader.stats()["reads"]["process"] == "runs"


@pytest.mark.usefixtures("no_pidfd")
def test_a_death_is_noticed() -> None:
    loader = DataLoader(Made(40, Deadly(17)), 4, num_workers=2)
    assert "is killed by signal: Killed" in str(error_of(WorkerDied, list, loader))


@pytest.mark.usefixtures("no_pidfd")
def test_replacing_says_what_it_needs() -> None:
    caught = error_of(RuntimeError, iter, DataLoader(Made(40, int), 4, num_workers=2, on_worker_death="replace"))
    assert str(caught).startswith("on_worker_death='replace' needs pidfd_open")
    assert "multiprocessing_context='spawn'" in str(caught)


@pytest.mark.usefixtures("no_pidfd")
def test_replacing_without_a_fork() -> None:
    more: dict[str, Any] = {"multiprocessing_context": "forkserver", "on_worker_death": "replace"}
    loader = DataLoader(Made(40, Deadly(17, "forkserver")), 4, num_workers=2, **more)
    assert [int(key) for batch in loader for key in batch] == list(range(40))
    assert loader.stats()["workers"] == {"died": 1, "hung": 0, "replaced": 1}


# --- a program that ignores SIGCHLD: no exit code is known to it ----------------------------------------------------

# Arguments: the key at which a worker is killed, once (-1: none), and ``on_worker_death``. Says the sum, or the error.
_IGNORES = """
import logging, multiprocessing, signal, sys
from minato_gpu import DataLoader
from tests.contracts.datasets import Deadly, Sourced

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
logging.basicConfig(stream=sys.stdout, format="%(message)s")
killed, on_worker_death = sys.argv[1:]
data, more = Sourced(64, Deadly(int(killed))), {"cache": "8MB", "on_worker_death": on_worker_death}
try:
    print(sum(int(batch.sum()) for batch in DataLoader(data, 4, num_workers=2, **more)))
except RuntimeError as error:
    print(type(error).__name__, error)
assert not multiprocessing.active_children()
"""
_WHOLE = str(sum(range(64)))
_DIED = "exited unexpectedly with an exit code that is not known, as something else has collected the process"


@pytest.mark.parametrize("on_worker_death", ["raise", "replace"])
def test_exit_codes_that_are_not_known(on_worker_death: str) -> None:
    def says(killed: int) -> list[str]:
        return programs.run("tests.support.source", _IGNORES, str(killed), on_worker_death).splitlines()

    assert says(-1) == [_WHOLE]
    told = says(11)
    assert _DIED in told[0]
    if on_worker_death == "replace":
        assert told[0].endswith("It is being replaced.") and told[1:] == [_WHOLE]
    else:
        assert told[0].startswith("WorkerDied DataLoader worker (pid(s) ") and len(told) == 1
