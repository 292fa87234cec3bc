"""Under a limit of address space, as batch systems set it, a loader leaves the program what it does not need."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from tests.contracts.datasets import Sourced
from tests.support.concurrency import said_by_a_child

pytestmark = pytest.mark.usefixtures("no_leaks")

_ROOM = 7 << 30  # of 8 GiB, torch itself takes some
_CACHE = "64MB"


def _made(key: int) -> Any:
    return torch.full((1000,), key)


def _limited(work: Callable[[], Any]) -> Any:
    def child() -> Any:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return work()

    return said_by_a_child(child)


SETTINGS: dict[str, dict[str, Any]] = {
    "workers": {"num_workers": 2},
    "many workers": {"num_workers": 16},
    "threads": {"num_workers": 2, "worker_kind": "thread"},
    "cache": {"num_workers": 2, "cache": _CACHE},
    "cache, threads": {"num_workers": 2, "worker_kind": "thread", "cache": _CACHE},
    "cache, persistent": {"num_workers": 2, "persistent_workers": True, "cache": _CACHE},
    "on disk": {"num_workers": 2, "cache": _CACHE, "cache_dir": True},
    "both": {"num_workers": 2, "cache": {"memory": _CACHE, "disk": _CACHE}, "cache_dir": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_loader_leaves_room(setting: str, tmp_path: Path) -> None:
    more = dict(SETTINGS[setting])
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


def test_a_limit_of_files_leaves_a_cache() -> None:
    """``ulimit -f`` is one of shared memory, too."""

    def child() -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_ROOM, _ROOM))
        loader: Any = DataLoader(Sourced(40, _made), 4, num_workers=2, cache=_CACHE)
        return [int(row[0]) for _ in range(2) for batch in loader for row in batch]

    assert said_by_a_child(child) == [*range(40)] * 2


def test_a_cache_for_which_there_is_no_room() -> None:
    error = _limited(lambda: iter(DataLoader(Sourced(40, _made), 4, num_workers=2, cache="20GB")))
    assert isinstance(error, OSError)
    assert "the cache keeps 20000000000 bytes in memory" in str(error) and "ulimit -v" in str(error)
