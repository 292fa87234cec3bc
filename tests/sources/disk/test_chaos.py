"""Some seeds of chaos (``python -m benchmarks.disk_chaos`` has more), and that chaos would notice what must not be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import disk_chaos
from minato_gpu.notices import LOGGER
from minato_gpu.sources.disk import tier as tier_module
from minato_gpu.sources.disk.files import SegmentFiles
from minato_gpu.sources.disk.ledger import Doomed, Ledger


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every death and every damage is a warning."""
    level = LOGGER.level
    LOGGER.setLevel(logging.ERROR)
    yield
    LOGGER.setLevel(level)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_wrong_is_served(seed: int, tmp_path: Path) -> None:
    row = disk_chaos.run(seed, tmp_path)
    assert row["broken"] == []
    assert list(tmp_path.iterdir()) == []


def _settled(ledger: Ledger, files: SegmentFiles, doomed: Doomed) -> bool:
    """What is doomed is taken to be free."""
    for (number, _), size in doomed.items():
        ledger.settle({number: size}, files.delete)
    return True


def _broken(tmp_path: Path) -> str:
    """What is wrong with the first seed that anything is wrong with."""
    for seed in range(40):
        if broken := disk_chaos.run(seed, tmp_path)["broken"]:
            return str(broken)
    return ""


def test_it_notices_a_tier_that_compares_no_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "checksum_of", lambda _: 0)
    assert "ended with 3" in _broken(tmp_path) or "wrong" in _broken(tmp_path)


def test_it_notices_space_that_is_not_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentFiles, "delete", lambda *_: None)
    monkeypatch.setattr(tier_module, "free", _settled)
    broken = _broken(tmp_path)
    assert "are not free" in broken or "on disk after a round" in broken


def test_it_notices_a_budget_that_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Ledger.lease
    monkeypatch.setattr(
        Ledger, "lease", lambda self, number, wanted, step, _: lease(self, number, wanted, step, 1 << 30)
    )
    assert "on disk after a round" in _broken(tmp_path)
