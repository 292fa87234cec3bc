"""Damaged files, full disks and directories that vanish: a miss, counted; never a wrong byte, never an error."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from minato_gpu.sources.disk.tier import DiskTier
from tests.sources.disk.content import BUDGET, SEGMENT, content, disk_bytes, elsewhere, held, keep, segments


def _spoil(file: Path, offset: int = 20_000) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(b"spoilt")


def _blank(file: Path) -> None:
    size = file.stat().st_size
    os.truncate(file, 0)
    os.truncate(file, size)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "spoilt": _spoil,
    "blank": _blank,
    "truncated": lambda file: os.truncate(file, 20_000),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("opened", [False, True], ids=["between runs", "while it is open"])
def test_what_a_segment_has_lost_is_a_miss_and_is_dropped(
    path: Path, tier: DiskTier, damage: Callable[[Path], object], opened: bool
) -> None:
    keep(tier, *range(40))
    if not opened:
        tier.close()
    damage(segments(path)[0])
    if not opened:
        tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    missing = {number for number in range(40) if held(tier, number) is None}
    assert 0 in missing and missing <= {*range(20)}
    assert all(held(tier, number) == content(number) for number in {*range(40)} - missing)
    if opened and damage is not Path.unlink:
        assert tier.stats()["corrupt"] == len(missing)
    assert keep(tier, *missing) == len(missing)
    assert all(held(tier, number) == content(number) for number in range(40))
    tier.close()


def test_verifying_finds_it_first(path: Path, tier: DiskTier) -> None:
    keep(tier, *range(40))
    _spoil(segments(path)[1])
    assert tier.verify() == (40, 40 * 50_000, 1)
    assert tier.verify() == (39, 39 * 50_000, 0)


def _shortened(index: Path) -> None:
    os.truncate(index, 12_288)


@pytest.mark.parametrize("damage", [_shortened, lambda index: _overwrite(index)], ids=["shortened", "overwritten"])
def test_a_damaged_index_empties_the_cache(
    path: Path, tier: DiskTier, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    keep(tier, *range(40))
    tier.close()
    damage(path / "index" / "data.mdb")
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    assert "index of the cache" in caplog.text and "begins anew" in caplog.text
    assert list(tier.entries()) == [] and disk_bytes(path) < 1 << 20
    assert keep(tier, 1) == 1 and held(tier, 1) == content(1)
    tier.close()


def _overwrite(index: Path) -> None:
    size = index.stat().st_size
    with index.open("r+b") as opened:
        opened.seek(8192)  # behind the pages that LMDB looks at when it opens
        opened.write(b"\xa5" * (size - 8192))


def test_a_single_record_that_is_not_what_was_written_is_noticed(path: Path, tier: DiskTier) -> None:
    keep(tier, 1234)
    tier.close()
    index = path / "index" / "data.mdb"
    index.write_bytes(index.read_bytes().replace(b"1234", b"1235"))
    tier = DiskTier(path, BUDGET)
    assert list(tier.entries()) == []
    tier.close()


def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev

    def full(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if len(buffers[0]) > 10_000:
            return write(fd, [buffers[0][:10_000]], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)


def test_on_a_full_disk_nothing_is_added_and_nothing_lost(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tier, 1)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "minato_gpu"):
        _no_room(patch)
        assert keep(tier, 2, 3) == 0
    assert caplog.text.count("the disk is full") == 1
    assert tier.stats()["disk_full"] == 2
    assert held(tier, 1) == content(1) and held(tier, 2) is None
    assert keep(tier, 2) == 1 and held(tier, 2) == content(2)


def test_the_same_where_no_file_may_grow(path: Path) -> None:
    """A limit of the kernel's, which the index meets too."""

    def limited() -> None:
        tier = DiskTier(path, BUDGET, segment_bytes=BUDGET)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
        assert keep(tier, *range(20)) == 7
        assert tier.stats()["disk_full"] == 13
        assert all(held(tier, number) == content(number) for number in range(7))
        taken = keep(tier, *range(100, 120), size=1)  # beyond the limit, too
        assert taken <= 11 and tier.stats()["off"] is None

    assert elsewhere(limited)
    tier = DiskTier(path, BUDGET)
    assert all(held(tier, number) == content(number) for number in range(7))
    tier.close()


@pytest.mark.parametrize("written", [True, False], ids=["a writer", "a reader"])
def test_a_directory_that_vanishes_ends_nothing(path: Path, tier: DiskTier, written: bool) -> None:
    keep(tier, *range(30))
    if not written:
        tier.close()
        tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    shutil.rmtree(path)
    assert keep(tier, 100) == 0
    assert all(held(tier, number) in (content(number), None) for number in range(30))
    assert "vanished" in str(tier.stats()["off"])
    assert not path.exists()
    tier.close()
    again = DiskTier(path, BUDGET)
    assert held(again, 1) is None and keep(again, 1) == 1
    again.close()


def test_too_many_open_files_drop_no_copy(path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tier, 1)
    tier.close()
    tier = DiskTier(path, BUDGET)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_, **__: _raise(errno.EMFILE))
        assert held(tier, 1) is None
    assert tier.stats()["failed"] == 1 and tier.stats()["corrupt"] == 0
    assert held(tier, 1) == content(1)
    tier.close()


def _raise(number: int) -> int:
    raise OSError(number, os.strerror(number))
