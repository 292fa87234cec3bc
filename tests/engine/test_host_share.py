"""The page by which ranks share a host's cores, and loaders that do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.engine import builder, host_share
from minato_gpu.engine.host_share import PERIOD_S, HostShare
from minato_gpu.memory.private_folder import PrivateFolder, SharedFile
from minato_gpu.options import host_cores
from minato_gpu.options.host_cores import HostCores

RANKS, CORES = 2, 8


def _loader(samples: int, batch: int = 1) -> Any:
    data: Any = range(samples)
    return DataLoader(data, batch, num_workers=1, max_workers="host", generator=torch.Generator())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own, with nothing in it."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host_cores, "usable_cores", lambda: CORES)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(RANKS))
    path = PrivateFolder()
    path.close()
    return path.path


def _of_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> HostCores:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    return HostCores.of_this_rank(1)


def test_jobs_have_pages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _of_rank(0, monkeypatch)
    assert one.job == _of_rank(1, monkeypatch).job
    monkeypatch.setenv("MASTER_PORT", "29999")
    assert one.job != _of_rank(1, monkeypatch).job


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("LOCAL_WORLD_SIZE", "9", "shares 8 cores out to 9 ranks"),
        ("LOCAL_WORLD_SIZE", "two", "LOCAL_WORLD_SIZE, which torchrun sets; it is 'two', not a number"),
        ("LOCAL_RANK", "2", "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
    ],
)
def test_variables_that_are_wrong(name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        _loader(2)


def test_who_has_less_ready_gets_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (HostShare(_of_rank(rank, monkeypatch), 4) for rank in range(RANKS))
    now = 100.0
    one.look(now, 5.0)
    assert one.workers == CORES  # the other has said nothing yet
    assert other.look(now, 2.0) and other.workers == 8
    assert not one.look(now + PERIOD_S / 2, 5.0)  # it has just looked
    assert one.look(now + PERIOD_S, 5.0) and one.workers == 1
    one.look(now + 2 * PERIOD_S, 1.0)
    assert (one.workers, other.look(now + 2 * PERIOD_S, 2.0), other.workers) == (8, True, 1)
    one.close()
    other.close()


def test_pages_of_killed_processes_are_removed(folder: Path) -> None:
    child = os.fork()
    if child == 0:
        SharedFile("left", 64)
        os._exit(0)
    os.waitpid(child, 0)
    assert [path.name for path in folder.iterdir()] == ["left"]
    file = SharedFile("mine", 64)
    assert [path.name for path in folder.iterdir()] == ["mine"]
    file.close()


def test_a_rank_alone_goes_on_without_a_page(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refused(*_: object) -> None:
        raise OSError("no folder for you")

    monkeypatch.setattr(builder, "HostShare", refused)
    assert [int(batch) for batch in _loader(8)] == list(range(8))
    assert "no folder for you" in caplog.text


def test_two_ranks_get_all_and_leave_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = []
    for rank in range(RANKS):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setattr(host_cores, "usable_cores", lambda: 2)
        loaders.append(_loader(64, 4))
    monkeypatch.setattr(host_share, "PERIOD_S", 0.0)  # looks at every delivery
    for _ in range(2):
        found = [torch.cat(pair).tolist() for pair in zip(*loaders, strict=True)]
        assert found == [2 * list(range(at, at + 4)) for at in range(0, 64, 4)]
        assert all(1 <= loader.stats()["workers"]["at_work"] <= 2 for loader in loaders)
    del loaders
    assert not list(folder.iterdir())


def test_who_is_silent_leaves_his_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (HostShare(_of_rank(rank, monkeypatch), 4) for rank in range(RANKS))
    other.look(100.0, 0.0)
    one.look(100.5, 3.0)
    assert one.workers == 1
    one.look(101.5, 3.0)
    assert one.workers == CORES
    one.close()
    other.close()
