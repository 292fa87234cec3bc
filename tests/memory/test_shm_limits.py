"""What has no room is said when the loader is made."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minato_gpu import DataLoader
from minato_gpu.memory import shm_limits

_DATA: Any = range(8)


def _free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=nbytes))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"collate_fn": list, "num_workers": 4}, True),
        ({"collate_fn": list, "num_workers": 2}, False),
        ({"collate_fn": list, "num_workers": 4, "worker_kind": "thread"}, False),
        ({"num_workers": 4}, False),
        ({"collate_fn": list}, False),
    ],
    ids=str,
)
def test_a_small_tmpfs(
    more: dict[str, Any], said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only where default_collate may run in a worker process does it matter; it is said once."""
    _free(monkeypatch, 48 << 20)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        for _ in range(2):
            DataLoader(_DATA, **more)
    assert [record.getMessage()[:30] for record in caplog.records] == ["/dev/shm has 48 MiB left for 4"] * said
    assert not said or "--shm-size" in caplog.text


def test_no_tmpfs_at_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(shm_limits, "_TMPFS", Path("/nowhere"))
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        DataLoader(_DATA, collate_fn=list, num_workers=1)
    assert "/dev/shm has 0 MiB left for 1 workers" in caplog.text


def test_a_budget_beyond_the_memory_there_is() -> None:
    limit, what = shm_limits.memory_limit()
    assert limit > 1 << 28
    with pytest.raises(ValueError, match=r"host_memory_budget=.* is more than the .* bytes of this"):
        DataLoader(_DATA, num_workers=1, host_memory_budget=limit + 1)
    DataLoader(_DATA, num_workers=1, host_memory_budget=limit)
    assert what


def test_the_limit_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(shm_limits, "_CGROUP", tmp_path)
    machine = shm_limits.memory_limit()
    assert machine[1] == "this machine's memory"
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert shm_limits.memory_limit() == (1 << 30, "this job's memory limit (memory.max)")


def test_no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(RuntimeError, match=r"cannot map 64 MiB of shared memory .* ulimit"):
        DataLoader(_DATA, num_workers=1)
