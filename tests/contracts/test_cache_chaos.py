"""Some seeds of chaos in a loader's cache (``python -m benchmarks.cache_chaos`` has more), and that it would notice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import cache_chaos
from minato_gpu.memory.arena import Arena
from minato_gpu.notices import LOGGER
from minato_gpu.sources import disk_pool, kept_memory


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every death and every damage is a warning."""
    level = LOGGER.level
    LOGGER.setLevel(logging.CRITICAL)
    yield
    LOGGER.setLevel(level)


@pytest.mark.parametrize("seed", range(2))
def test_nothing_wrong_is_delivered(seed: int, tmp_path: Path) -> None:
    row = cache_chaos.run(seed, tmp_path)
    assert row["broken"] == []
    assert row["samples"] > 0
    assert list(tmp_path.iterdir()) == []


def _broken(tmp_path: Path, first: int) -> str:
    """What is wrong with the first seed that anything is wrong with."""
    for seed in range(first, first + 40):
        if broken := cache_chaos.run(seed, tmp_path)["broken"]:
            return str(broken)
    return ""


def test_it_notices_versions_that_are_not_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_pool, "version_of", lambda _: b"")
    assert "not what is there" in _broken(tmp_path, 9)


def test_it_notices_memory_that_is_not_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "forsake", lambda *_: None)
    assert "bytes in memory" in _broken(tmp_path, 2)


def test_it_notices_copies_that_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory.Table, "take", lambda *_: None)
    assert "reads of what was kept" in _broken(tmp_path, 13)
