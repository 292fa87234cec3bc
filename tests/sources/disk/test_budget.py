"""The budget in bytes holds on disk, over all processes, and what is removed is free."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from minato_gpu.sources.disk import freeing
from minato_gpu.sources.disk.files import OpenFile, SegmentFiles
from minato_gpu.sources.disk.index import Index
from minato_gpu.sources.disk.ledger import Ledger
from minato_gpu.sources.disk.records import allotted
from minato_gpu.sources.disk.tier import DiskTier
from tests.sources.disk.content import BUDGET, SEGMENT, Elsewhere, content, disk_bytes, elsewhere, held, keep, segments


@pytest.mark.parametrize("size", [1, 5_000, 50_000, 700_000])
def test_no_more_is_taken_than_the_budget(path: Path, tier: DiskTier, size: int) -> None:
    taken = keep(tier, *range(3 * BUDGET // max(size, 4096)), size=size)
    assert disk_bytes(path) <= tier.nbytes() <= BUDGET
    assert taken * allotted(size, 4096) > 0.7 * BUDGET  # and not much less
    stats = tier.stats()
    assert stats["refused"] == 3 * BUDGET // max(size, 4096) - taken and stats["written"] == taken


def test_it_is_that_of_all_processes_together(path: Path) -> None:
    other = Elsewhere(lambda: keep(DiskTier(path, BUDGET, segment_bytes=SEGMENT), *range(1000, 1200)))
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    keep(tier, *range(50))
    assert other.succeeds()
    assert disk_bytes(path) <= tier.nbytes() <= BUDGET
    assert keep(tier, *range(2000, 2100)) < 10
    assert held(tier, 1000) == content(1000)
    assert disk_bytes(path) <= BUDGET
    tier.close()


def test_what_is_removed_is_free_again(path: Path, tier: DiskTier) -> None:
    taken = keep(tier, *range(300))
    full = disk_bytes(path)
    freed = tier.remove(b"%d" % number for number in range(0, taken, 2))
    assert freed == (taken + 1) // 2 * 53_248
    assert disk_bytes(path) <= full - freed + (64 << 10)
    assert all((held(tier, number) == content(number)) == (number % 2 == 1) for number in range(taken))
    assert keep(tier, *range(1000, 1300)) >= taken // 2 - 1
    assert disk_bytes(path) <= tier.nbytes() <= BUDGET
    tier.remove([entry.key for entry in tier.entries()])
    assert len(segments(path)) == 1  # the one that is being written to
    assert disk_bytes(path / "segments") <= 64 << 10


def test_a_hole_goes_to_its_segment_whatever_other_threads_delete_and_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment when the segment is open and the system call."""
    folder = OpenFile(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    files = SegmentFiles(folder.fd)
    for number in (1, 2):
        files.create(number)
    went_to: list[int] = []

    def punch(fd: int, offset: int, length: int) -> bool:
        files.delete(2)
        with (tmp_path / "other").open("w"):
            went_to.append(os.fstat(fd).st_ino)
        return True

    monkeypatch.setattr(freeing, "punch_hole", punch)
    ledger = create_autospec(Ledger, instance=True)
    ledger.accounts.return_value = []
    assert freeing.free(ledger, files, {(1, 0): 4096})
    assert went_to == [(tmp_path / f"{1:016x}.seg").stat().st_ino]
    files.close()


def test_of_a_disk_without_holes_space_is_charged_until_a_whole_segment_is_free(
    path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freeing, "punch_hole", lambda *_: False)
    keep(tier, *range(60))
    before = tier.nbytes()
    tier.remove(b"%d" % number for number in range(18))
    assert before <= tier.nbytes() <= before + (64 << 10)  # the index may grow
    tier.remove(b"%d" % number for number in range(18, 20))
    assert tier.nbytes() <= before - 18 * 53_248 and len(segments(path)) <= 3
    assert disk_bytes(path) <= tier.nbytes()


def test_what_a_killed_process_had_set_aside_or_not_freed_yet_is_given_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other() -> None:
        tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
        keep(tier, *range(30))
        monkeypatch.setattr(freeing, "punch_hole", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tier.remove([b"1", b"2"])

    assert elsewhere(other)
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    kept = {number for number in range(30) if held(tier, number) == content(number)}
    assert kept == {*range(30)} - {1, 2}
    assert disk_bytes(path / "segments") <= 28 * 53_248 + (64 << 10)
    tier.close()
    index = Index(path / "index")
    assert Ledger(index, 4096).charged() == 28 * 53_248
    index.close()
