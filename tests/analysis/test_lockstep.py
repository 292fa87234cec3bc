"""Rank 0 decides for all ranks, and who has lost it decides alone."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from minato_gpu.analysis.lockstep import Lockstep
from minato_gpu.analysis.ranks import Ranks


def test_all_ranks_do_what_the_first_one_thinks(tmp_path: Path) -> None:
    first, second = Lockstep(tmp_path, 0, 2), Lockstep(tmp_path, 1, 2)
    thought = [True, False, False, True]
    assert [first.agreed(mine) for mine in thought] == thought
    assert [second.agreed(False) for _ in thought] == thought
    assert not second.lost
    first.close()
    second.close()
    second.close()


def test_alone_it_decides_by_itself(tmp_path: Path) -> None:
    alone = Lockstep(tmp_path, 0, 1)
    assert alone.agreed(True) and not alone.agreed(False)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_leader_has_gone_goes_on(tmp_path: Path) -> None:
    ticks = count(step=40)
    second = Lockstep(tmp_path, 1, 2, lambda: float(next(ticks)))
    assert second.agreed(True) and second.lost and not second.agreed(False)
    second.close()


def test_ranks_meet_in_one_private_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    second = Ranks.of_environment()
    assert second == Ranks(1, 2, 2)
    with Ranks(0, 2, 2).folder() as first, second.folder() as other:
        assert first == other and first.stat().st_mode & 0o777 == 0o700
        assert first.exists()
    assert not first.exists()
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="no rank"):
        Ranks.of_environment()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="2 of 4 ranks are on other hosts"):
        Ranks.of_environment()


def test_alone_the_folder_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.of_environment()
    with ranks.folder() as one, ranks.folder() as two:
        assert one != two
    assert not one.exists() and not two.exists()
