"""The tier as who uses it sees it: copies are found, read and replaced, and no wrong byte is served."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from minato_gpu.sources.disk import directory
from minato_gpu.sources.disk.directory import CacheDirectoryError
from minato_gpu.sources.disk.filesystem import remote_kind
from minato_gpu.sources.disk.index import Index
from minato_gpu.sources.disk.tier import DiskTier
from tests.sources.disk.content import BUDGET, SEGMENT, VERSION, Elsewhere, content, elsewhere, held, keep, segments


def test_what_is_written_is_read_and_outlives_the_run(path: Path, tier: DiskTier) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    assert keep(tier, *range(50)) == 50
    assert [held(tier, number) for number in range(50)] == [content(number) for number in range(50)]
    tier.close()
    again = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    assert [held(again, number) for number in range(50)] == [content(number) for number in range(50)]
    found = again.find(b"7", VERSION)
    assert found is not None and found.length == 50_000
    again.close()
    assert len([*Path("/proc/self/fd").iterdir()]) < before, "nothing of it stays open"


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
    assert held(tier, 1) == content(1) and keep(tier, 2) == 1


def test_after_closing_everything_is_a_miss(tier: DiskTier) -> None:
    keep(tier, 1)
    entry = tier.find(b"1", VERSION)
    tier.close()
    tier.close()
    assert entry is not None and not tier.read(entry, memoryview(bytearray(50_000)))
    assert held(tier, 1) is None and keep(tier, 2) == 0 and list(tier.entries()) == [] and tier.nbytes() == 0


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


# --- what may happen to the disk -------------------------------------------------------------------------------


def _spoil(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(20_000)
        opened.write(b"spoilt")


def _overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(8192)  # behind the pages that LMDB looks at when it opens
        opened.write(b"\xa5" * (file.stat().st_size - 8192))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "spoilt": _spoil,
    "truncated": lambda file: os.truncate(file, 20_000),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("opened", [False, True], ids=["between runs", "while it is open"])
def test_what_a_file_has_lost_is_a_miss_and_is_dropped(
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
    assert tier.verify() == (40 - len(missing), (40 - len(missing)) * 50_000, 0)
    assert keep(tier, *missing) == len(missing)
    assert all(held(tier, number) == content(number) for number in range(40))
    tier.close()


@pytest.mark.parametrize("damage", [lambda index: os.truncate(index, 12_288), _overwrite], ids=["cut", "overwritten"])
def test_a_damaged_index_empties_the_cache(
    path: Path, tier: DiskTier, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    keep(tier, *range(40))
    tier.close()
    damage(path / "index" / "data.mdb")
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    assert "index of the cache" in caplog.text and "begins anew" in caplog.text
    assert list(tier.entries()) == [] and keep(tier, 1) == 1 and held(tier, 1) == content(1)
    tier.close()


def test_a_single_record_that_is_not_what_was_written_is_noticed(path: Path, tier: DiskTier) -> None:
    keep(tier, 1234)
    tier.close()
    index = path / "index" / "data.mdb"
    index.write_bytes(index.read_bytes().replace(b"1234", b"1235"))
    tier = DiskTier(path, BUDGET)
    assert list(tier.entries()) == []
    tier.close()


def test_where_no_file_may_grow_nothing_is_added_and_nothing_lost(path: Path) -> None:
    """A limit of the kernel's, as of a full disk, which the index meets too."""

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


def test_too_many_open_files_drop_no_copy(path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    keep(tier, 1)
    tier.close()
    tier = DiskTier(path, BUDGET)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert held(tier, 1) is None
    assert tier.stats()["failed"] == 1 and tier.stats()["corrupt"] == 0
    assert held(tier, 1) == content(1)
    tier.close()


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
    (path / "format").write_text("minato-gpu cache, format 2\n")
    _refused(path, "format 2", "--empty")
    assert directory.wipe(path)
    DiskTier(path, BUDGET).close()
    assert remote_kind(tmp_path) is None and remote_kind("/dev/shm") is None


def test_one_that_it_makes_is_the_users_alone_and_others_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "made" / "for" / "it"
    _refused(path, "is no cache", budget=None)
    assert not path.exists(), "looking makes nothing"
    path.mkdir(mode=0o755, parents=True)
    DiskTier(path, BUDGET).close()
    assert all(file.stat().st_mode & 0o077 == 0 for file in [path, *path.rglob("*")])
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("all of it")
    _refused(other, "thesis.txt", "a directory of its own")
    _refused(other / "thesis.txt", "is a file")
    with pytest.raises(CacheDirectoryError, match="is no cache"):
        directory.wipe(other)
    assert [file.name for file in other.iterdir()] == ["thesis.txt"]


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


def test_the_kernel_says_whose_turn_it_is_to_write_to_the_index(tmp_path: Path) -> None:
    """LMDB's own mutex is a futex: who was woken and is killed before it runs takes the turn of who waits behind."""
    index = Index(tmp_path)
    beside = os.open(tmp_path, os.O_RDONLY)
    with index.write(), pytest.raises(BlockingIOError):
        fcntl.flock(beside, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(beside)
    index.close()
