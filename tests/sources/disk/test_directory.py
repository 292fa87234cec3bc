"""Directories in which bytes would not be safe are refused, with what to do about it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from minato_gpu.sources.disk import directory, index
from minato_gpu.sources.disk.directory import CacheDirectoryError
from minato_gpu.sources.disk.filesystem import remote_kind
from minato_gpu.sources.disk.tier import DiskTier
from tests.sources.disk.content import BUDGET, Elsewhere, content, elsewhere, held, keep


def _refused(path: Path, *words: str, budget: int | None = BUDGET) -> None:
    with pytest.raises(CacheDirectoryError) as raised:
        DiskTier(path, budget)
    assert all(word in str(raised.value) for word in (str(path), *words)), raised.value


def test_it_is_made_with_its_parents_and_is_the_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "made" / "for" / "it"
    DiskTier(path, BUDGET).close()
    assert all(file.stat().st_mode & 0o077 == 0 for file in [path, *path.rglob("*")])


def test_an_empty_one_that_others_may_read_is_closed_to_them(path: Path) -> None:
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    DiskTier(path, BUDGET).close()
    assert path.stat().st_mode & 0o777 == 0o700


def test_one_that_others_could_write_to_is_refused(path: Path) -> None:
    DiskTier(path, BUDGET).close()
    path.chmod(0o770)
    _refused(path, "others may write", "770", "chmod 700")


def test_another_users_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskTier(path, BUDGET).close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    _refused(path, "another user", "12345")


def test_files_that_are_no_caches_are_left_alone(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("all of it")
    _refused(path, "thesis.txt", "a directory of its own")
    _refused(path / "thesis.txt", "is a file")
    with pytest.raises(CacheDirectoryError, match="is no cache"):
        directory.wipe(path)
    assert [file.name for file in path.iterdir()] == ["thesis.txt"]


def test_one_that_cannot_be_written_to_is_refused() -> None:
    _refused(Path("/sys/minato-gpu-cache"), "cannot be used")  # not even by root


def test_another_format_is_refused_and_can_be_emptied(path: Path) -> None:
    DiskTier(path, BUDGET).close()
    (path / "format").write_text("minato-gpu cache, format 2\n")
    _refused(path, "format 2", "--empty")
    assert directory.wipe(path)
    DiskTier(path, BUDGET).close()


def test_a_budget_larger_than_the_disk_is_refused_and_nothing_stays_open(path: Path) -> None:
    _refused(path, "bytes are free", "does not fit", budget=1 << 60)
    tier = DiskTier(path, BUDGET)
    assert keep(tier, 1) == 1
    tier.close()


def test_a_budget_too_small_for_anything_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="at least 4,194,304 bytes"):
        DiskTier(path, 1 << 20)
    assert not path.exists()


def test_network_file_systems_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "remote_kind", lambda _: "NFS")
    _refused(path, "NFS", "a disk of this machine")


def test_the_file_system_is_asked_what_it_is(tmp_path: Path) -> None:
    assert remote_kind(tmp_path) is None and remote_kind("/dev/shm") is None
    with pytest.raises(FileNotFoundError):
        remote_kind(tmp_path / "nothing")


def test_looking_makes_nothing(path: Path) -> None:
    _refused(path, "is no cache", budget=None)
    assert not path.exists()
    DiskTier(path, BUDGET).close()
    tier = DiskTier(path, None)
    assert keep(tier, 1) == 0 and tier.stats()["refused"] == 1
    tier.close()


def test_what_its_maker_left_half_made_is_finished(path: Path) -> None:
    for parts in ((), ("gate",), ("gate", "lock", "format.new"), ("gate", "lock", "format", "index-renewed-1")):
        shutil.rmtree(path, ignore_errors=True)
        tier = DiskTier(path, BUDGET)
        keep(tier, 1)
        tier.close()
        (path / "format.new").touch()
        (path / "index-renewed-1").mkdir()
        for file in path.iterdir():
            if file.name not in parts:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        tier = DiskTier(path, BUDGET)
        assert held(tier, 1) is None and keep(tier, 1) == 1
        tier.close()


def test_who_comes_while_another_is_there_repairs_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> None:
        monkeypatch.setattr(directory, "renew", lambda _: 1 / 0)
        assert held(DiskTier(path, BUDGET), 1) == content(1)

    process = Elsewhere(other)
    tier = DiskTier(path, BUDGET)
    keep(tier, 1)
    assert process.succeeds()
    assert not directory.wipe(path)
    tier.close()
    assert not elsewhere(other)  # nobody is there, so this one would


def test_without_room_for_another_index_the_old_one_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(path, BUDGET)
    keep(tier, *range(20))
    tier.close()
    monkeypatch.setattr(index, "_MAP_BYTES", 1 << 14)  # of the new one
    assert index.renew(path / "index")
    monkeypatch.undo()
    tier = DiskTier(path, BUDGET)
    assert all(held(tier, number) == content(number) for number in range(20))
    tier.close()
