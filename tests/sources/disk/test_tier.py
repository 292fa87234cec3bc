"""The tier as who uses it sees it: copies are found, read, replaced and removed, across processes and runs."""

from __future__ import annotations

import struct
import threading
from functools import partial
from pathlib import Path

import pytest

from minato_gpu.sources.disk.directory import CacheDirectoryError
from minato_gpu.sources.disk.records import Entry
from minato_gpu.sources.disk.tier import DiskTier
from tests.sources.disk.content import BUDGET, SEGMENT, VERSION, Elsewhere, content, elsewhere, held, keep, segments
from tests.support.leaks import open_links


def test_what_is_written_is_read_and_outlives_the_run(path: Path, tier: DiskTier) -> None:
    assert keep(tier, *range(50)) == 50
    assert [held(tier, number) for number in range(50)] == [content(number) for number in range(50)]
    tier.close()
    again = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    assert [held(again, number) for number in range(50)] == [content(number) for number in range(50)]
    found = again.find(b"7", VERSION)
    assert found is not None and found.length == 50_000
    assert len(segments(path)) == 3  # of 20 each
    again.close()


def test_entries_of_versions_that_wrote_down_a_cost_are_read_and_these_read_ours() -> None:
    entry = Entry(b"key", b"version", 1, 2, 3, 4, 5.0)
    theirs = struct.Struct("<QQQQdd")
    assert Entry.unpack(b"key", theirs.pack(1, 2, 3, 4, 0.5, 5.0) + b"version") == entry
    assert theirs.unpack_from(entry.pack()) == (1, 2, 3, 4, 0.0, 5.0)
    assert entry.pack()[theirs.size :] == b"version"


def test_sizes_from_nothing_to_more_than_a_segment(tier: DiskTier) -> None:
    sizes = (0, 1, 4095, 4096, 4097, SEGMENT, SEGMENT + 1, 2 * SEGMENT)
    assert sum(keep(tier, size, size=size) for size in sizes) == len(sizes)
    assert all(held(tier, size) == content(size, size) for size in sizes)


def test_another_version_is_a_miss_and_drops_the_copy(tier: DiskTier) -> None:
    keep(tier, 1)
    assert held(tier, 1, b"2") is None
    assert held(tier, 1) is None
    stats = tier.stats()
    assert (stats["stale"], stats["misses"], stats["hits"]) == (1, 2, 0)


def test_a_new_version_takes_the_place_of_the_old_one_and_its_space_is_free(tier: DiskTier) -> None:
    keep(tier, 1, size=1_000_000)
    before = tier.nbytes()
    for version in range(2, 40):
        assert tier.write(b"1", b"%d" % version, memoryview(content(version, 1_000_000)))
    assert held(tier, 1, b"39") == content(39, 1_000_000)
    assert tier.nbytes() < before + SEGMENT + (1 << 19)


def test_no_byte_is_written_twice(path: Path, tier: DiskTier) -> None:
    keep(tier, 1)
    held_bytes = tier.nbytes()
    assert keep(tier, 1) == 1
    assert tier.nbytes() == held_bytes and tier.stats()["written"] == 1


def test_a_process_sees_at_once_what_others_do(path: Path) -> None:
    def other() -> None:
        theirs = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
        assert held(theirs, 1) == content(1)
        assert keep(theirs, 2) == 1
        theirs.remove([b"1"])

    process = Elsewhere(other)
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    keep(tier, 1)
    entry = tier.find(b"1", VERSION)
    assert process.succeeds()
    assert held(tier, 2) == content(2)
    assert held(tier, 1) is None
    assert entry is not None and not tier.read(entry, memoryview(bytearray(50_000)))  # it was found before
    assert tier.stats()["gone"] == 1 and tier.stats()["corrupt"] == 0
    tier.close()


def test_processes_that_come_after_each_other_fill_the_same_segment(path: Path) -> None:
    for number in range(5):
        tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
        keep(tier, number)
        tier.close()
        assert elsewhere(partial(_keep_in, path, 10 + number))
    assert len(segments(path)) == 1
    tier = DiskTier(path, BUDGET)
    assert all(held(tier, number) == content(number) for number in (*range(5), *range(10, 15)))
    tier.close()


def test_threads_may_share_it(tier: DiskTier) -> None:
    wrong: list[int] = []

    def use(first: int) -> None:
        for number in range(first, first + 20):
            keep(tier, number)
            wrong.extend(other for other in range(first, number + 1) if held(tier, other) not in (content(other), None))
            if number % 3 == 0:
                tier.remove([b"%d" % number])

    threads = [threading.Thread(target=use, args=(10 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and tier.stats()["corrupt"] == 0


def test_a_forks_copy_misses_and_leaves_the_parents_alone(path: Path, tier: DiskTier) -> None:
    def child() -> None:
        assert held(tier, 1) is None and keep(tier, 2) == 0 and tier.remove([b"1"]) == 0
        assert "forked" in tier.stats()["off"]
        tier.close()

    keep(tier, 1)
    assert elsewhere(child)
    assert held(tier, 1) == content(1) and keep(tier, 2) == 1 and len(segments(path)) == 1


def test_after_closing_everything_is_a_miss(tier: DiskTier) -> None:
    keep(tier, 1)
    entry = tier.find(b"1", VERSION)
    tier.close()
    tier.close()
    assert entry is not None and not tier.read(entry, memoryview(bytearray(50_000)))
    assert held(tier, 1) is None and keep(tier, 2) == 0 and list(tier.entries()) == [] and tier.nbytes() == 0


def test_nothing_of_it_stays_open(path: Path) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    keep(tier, *range(50))
    assert all(held(tier, number) for number in range(50))
    tier.close()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_segment_that_is_gone_is_closed(path: Path, tier: DiskTier) -> None:
    keep(tier, *range(50))
    assert all(held(tier, number) for number in range(50))
    segments = len([*path.rglob("*.seg")])
    tier.remove(b"%d" % number for number in range(50))
    assert len([*path.rglob("*.seg")]) < segments
    assert not [link for link in open_links() if str(path) in link and "(deleted)" in link]


def test_misuse_is_said(path: Path, tier: DiskTier) -> None:
    keep(tier, 1)
    entry = tier.find(b"1", VERSION)
    assert entry is not None
    with pytest.raises(ValueError, match="50000 bytes do not go into 49999"):
        tier.read(entry, memoryview(bytearray(49_999)))
    for key, version in ((b"", b"1"), (b"k" * 512, b"1"), (b"k", b"v" * 1025)):
        with pytest.raises(ValueError, match="give a digest"):
            tier.write(key, version, memoryview(b"x"))
    with pytest.raises(CacheDirectoryError, match="already open in this process"):
        DiskTier(path, BUDGET)
    assert held(tier, 1) == content(1)


def _keep_in(path: Path, number: int) -> None:
    assert keep(DiskTier(path, BUDGET, segment_bytes=SEGMENT), number) == 1
