"""Copies are found, read and replaced, and no wrong byte is served, whatever happens to the disk or to processes."""

from __future__ import annotations

import errno
import os
import random
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from minato_gpu.sources.disk import directory
from minato_gpu.sources.disk.directory import CacheDirectoryError
from minato_gpu.sources.disk.filesystem import remote_kind
from minato_gpu.sources.disk.tier import DiskTier
from tests.sources.disk.content import (
    BUDGET,
    VERSION,
    content,
    disk_bytes,
    elsewhere,
    file_of,
    held,
    keep,
    kept,
    key,
)


def test_what_is_written_is_read_and_outlives_the_run(path: Path, tier: DiskTier) -> None:
    sizes = (0, 1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1)
    before = len([*Path("/proc/self/fd").iterdir()])
    assert keep(tier, *range(50)) == 50
    assert sum(keep(tier, 100 + size, size=size) for size in sizes) == len(sizes)
    for opened in (tier, again := DiskTier(path, BUDGET)):
        assert [held(opened, number) for number in range(50)] == [content(number) for number in range(50)]
        assert all(held(opened, 100 + size) == content(100 + size, size) for size in sizes)
    again.close()
    tier.close()
    assert len([*Path("/proc/self/fd").iterdir()]) < before, "nothing of it stays open"
    assert [*path.glob("runs/*")] == []
    assert held(tier, 1) is None and keep(tier, 2) == 0 and not [*tier.entries()] and tier.nbytes() == 0


def test_versions(path: Path, tier: DiskTier) -> None:
    """A copy of another one is a miss and goes; a new one takes its place, and its room; none is written twice."""
    keep(tier, 1)
    assert held(tier, 1, b"2") is None and held(tier, 1) is None
    assert [tier.stats()[name] for name in ("stale", "misses", "hits")] == [1, 2, 0]
    for version in range(3, 40):
        assert keep(tier, 1, version=b"%d" % version, size=1_000_000) == 1
    before = tier.nbytes()
    assert keep(tier, 1, version=b"39", size=1_000_000) == 1
    assert tier.nbytes() == before < tier._overhead + 1_010_000
    assert tier.stats()["written"] == 38
    assert held(tier, 1, b"39") == content(1, 1_000_000)
    with pytest.raises(ValueError, match="16 bytes, got 3; give a digest"):
        tier.write(b"key", VERSION, memoryview(b"x"))


# --- what may happen to the disk -------------------------------------------------------------------------------


def test_damage_anywhere_is_a_miss_and_the_copy_goes(path: Path, tier: DiskTier) -> None:
    keep(tier, *range(60))
    draw = random.Random(0)
    for number in range(50):
        file = file_of(path, number)
        data = bytearray(file.read_bytes())
        if number % 5 == 0:
            del data[draw.randrange(len(data)) :]
        else:
            at = draw.randrange(56 if number % 2 else len(data))
            data[at] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    keep(tier, 58)
    file_of(path, 59).unlink()
    assert [number for number in range(60) if held(tier, number) == content(number)] == [*range(50, 59)]
    assert kept(tier) == {*range(50, 59)} and tier.stats()["corrupt"] == 50
    assert keep(tier, *range(60)) == 60
    assert all(held(tier, number) == content(number) for number in range(60))


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Of blocks, or of inodes; nothing is lost, and where it has room again more is kept. Needs to be root."""
    for option, number in (("size=6M", 70), ("nr_inodes=100", 90)):
        mounted = tmp_path / option
        mounted.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(mounted)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("may not mount a file system")
        try:
            size = 70_000 if number == 70 else 10
            tier = DiskTier(mounted / "cache", 5 << 20)
            (mounted / "other").write_bytes(bytes(4 << 20 if number == 70 else 10))
            taken = [each for each in range(200) if keep(tier, each, size=size)]  # a folder may be there already
            assert 0 < len(taken) < number and tier.stats()["disk_full"] == 200 - len(taken)
            assert all(held(tier, each) == content(each, size) for each in taken) and tier.stats()["off"] is None
            assert disk_bytes(mounted / "cache") <= tier.nbytes() and not [*mounted.glob("cache/runs/*/[0-9]*")]
            late = DiskTier(mounted / "cache", 4 << 20) if number != 70 else tier
            assert held(late, taken[0]) == content(taken[0], size)
            (mounted / "other").unlink()
            late.remove(key(each) for each in taken[:3])
            late.begin_epoch()
            assert keep(late, taken[0], size=size) == 1
            late.close()
            tier.close()
        finally:
            subprocess.run(["umount", "-l", str(mounted)], check=True)


@pytest.mark.parametrize("call", ["mkdir", "utime"])
def test_a_disk_that_can_only_be_read_serves(path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    tier = DiskTier(path, BUDGET)
    keep(tier, 1)
    tier.close()
    os.utime(file_of(path, 1), (1e9, 1e9))
    monkeypatch.setattr(os, call, refuse)
    tier = DiskTier(path, BUDGET)
    assert held(tier, 1) == content(1)
    if call == "mkdir":
        assert keep(tier, 2) == 0 and tier.stats()["off"] is None
    tier.close()


# --- processes that are killed ---------------------------------------------------------------------------------


def _work(path: Path, changes: int) -> None:
    """Writes, replaces and removes copies, and dies before it changes a file once more than so often."""
    made = count()

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *what, **more: os._exit(1) if next(made) == changes else change(*what, **more)

    for name in ("mkdir", "pwrite", "pwritev", "rename", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    tier = DiskTier(path, BUDGET)
    tier.begin_epoch()
    keep(tier, 1, 2)
    keep(tier, 2, version=b"2")
    tier.remove([key(1)])
    tier.close()


def test_a_death_at_any_moment(path: Path) -> None:
    """Nothing wrong is served, the budget holds, and nothing of the dead stays."""
    changes, has_ended = 0, False
    while not has_ended:
        has_ended = elsewhere(partial(_work, path, changes))
        tier = DiskTier(path, BUDGET)
        assert tier._account.count_all() == tier._account.look() and disk_bytes(path) <= tier.nbytes() <= BUDGET
        assert len([*path.glob("runs/*")]) == 1 and not [*path.glob("runs/*/[0-9]*")]
        assert all(held(tier, each) in (None, content(each)) for each in kept(tier)), "of the other version, or whole"
        assert not tier.stats()["corrupt"]
        tier.remove([key(1), key(2)])
        tier.close()
        changes += 1
    assert changes > 15


def test_what_a_dead_process_was_writing_is_removed_beside_a_living_one(path: Path, tier: DiskTier) -> None:
    def other() -> None:
        theirs = DiskTier(path, BUDGET)
        theirs._publish = lambda *_: os._exit(0)  # type: ignore[method-assign]
        keep(theirs, 2)

    keep(tier, 1)
    before = tier.nbytes()
    assert elsewhere(other)
    assert tier.nbytes() > before and [*path.glob("runs/*/[0-9]*")]
    tier.begin_epoch()
    assert tier.nbytes() == before and not [*path.glob("runs/*/[0-9]*")]


# --- directories -----------------------------------------------------------------------------------------------


def _refused(path: Path, *words: str, budget: int | None = BUDGET) -> None:
    with pytest.raises(CacheDirectoryError) as raised:
        DiskTier(path, budget)
    assert all(word in str(raised.value) for word in (str(path), *words)), raised.value


def test_directories_in_which_bytes_would_not_be_safe_are_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DiskTier(path, BUDGET).close()
    path.chmod(0o770)
    _refused(path, "others may write", "770", "chmod 700")
    path.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        _refused(path, "another user", "12345")
    with monkeypatch.context() as patch:
        patch.setattr(directory, "remote_kind", lambda _: "NFS")
        _refused(tmp_path / "on NFS", "NFS", "a disk of this machine")
    _refused(Path("/sys/minato-gpu-cache"), "cannot be used")  # not even by root
    _refused(path, "bytes are free", "does not fit", budget=1 << 60)
    assert remote_kind(tmp_path) is None and remote_kind("/dev/shm") is None


def test_another_format_is_refused(path: Path) -> None:
    path.mkdir()
    (path / "format").write_text("minato-gpu cache, format 1\n")
    _refused(path, "format 1", "has 2", "delete it")


def test_one_that_it_makes_is_the_users_alone_and_others_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "made" / "for" / "it"
    _refused(path, "is no cache", budget=None)
    assert not path.exists(), "looking makes nothing"
    path.mkdir(mode=0o755, parents=True)
    (path / "format.123").touch()  # of a process that was killed
    tier = DiskTier(path, BUDGET)
    keep(tier, 1)
    assert all(file.stat().st_mode & 0o077 == 0 for file in [path, *path.rglob("*")] if file.name != "format.123")
    assert not directory.wipe(path), "it is open"
    tier.close()
    assert directory.wipe(path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("all of it")
    _refused(other, "thesis.txt", "a directory of its own")
    _refused(other / "thesis.txt", "is a file")
    with pytest.raises(CacheDirectoryError, match="is no cache"):
        directory.wipe(other)
    assert [file.name for file in other.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", ["account", "runs/*/record"])
def test_damage_to_what_is_not_a_copy_loses_none(path: Path, tier: DiskTier, name: str) -> None:
    keep(tier, *range(60))
    tier.begin_epoch()
    before = tier.nbytes()
    (file,) = path.glob(name)
    for damaged in (b"", b"\0" * 20, os.urandom(20), os.urandom(5)):
        file.write_bytes(damaged)
        assert keep(tier, 60) == 1 and held(tier, 60) == content(60)
        assert tier.remove([key(60)]) and tier.nbytes() == before
    assert kept(tier) == {*range(60)}
