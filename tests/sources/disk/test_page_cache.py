"""What the tier keeps is not held a second time in the page cache, with the kernel's help and without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.page_cache import cached_pages
from minato_gpu.sources.disk.filesystem import Uncached

SIZE = 1 << 20


@pytest.fixture
def fd(tmp_path: Path) -> int:
    """A file of 64 MB to be, on a disk whose page cache can be looked at."""
    made = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    if cached_pages(made) is None:
        pytest.skip("this kernel has no cachestat")
    os.pwrite(made, bytes(4096), 0)
    os.fdatasync(made)
    os.posix_fadvise(made, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(made):
        pytest.skip("temporary files are on a file system in memory")
    return made


@pytest.mark.parametrize("dontcache", [True, False], ids=["by the kernel", "by hand"])
def test_reading_and_writing_fill_no_page_cache(fd: int, dontcache: bool) -> None:
    uncached, data = Uncached(dontcache), memoryview(os.urandom(SIZE))
    for number in range(64):
        uncached.write(fd, data, number * SIZE)
    os.fdatasync(fd)  # what the kernel gives back by itself, it gives back once it has been written
    pages = 64 * SIZE // os.sysconf("SC_PAGESIZE")
    assert (cached_pages(fd) or 0) < pages // 4
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    into = memoryview(bytearray(SIZE))
    for number in range(64):
        assert uncached.read(fd, into, number * SIZE) == SIZE and into == data
    assert (cached_pages(fd) or 0) < pages // 16
    os.close(fd)


def test_without_uncached_reads_pages_would_stay(fd: int) -> None:
    os.pwrite(fd, bytes(SIZE), 0)
    assert (cached_pages(fd) or 0) >= SIZE // os.sysconf("SC_PAGESIZE")
    os.close(fd)


@pytest.mark.parametrize("dontcache", [True, False])
def test_a_file_that_ends_early_is_told(tmp_path: Path, dontcache: bool) -> None:
    (tmp_path / "short").write_bytes(b"x" * 5000)
    file = os.open(tmp_path / "short", os.O_RDWR)
    assert Uncached(dontcache).read(file, memoryview(bytearray(8192)), 0) == 5000
    assert Uncached(dontcache).read(file, memoryview(bytearray(8192)), 8192) == 0
    os.close(file)


def test_where_the_kernel_cannot_it_is_done_by_hand(tmp_path: Path) -> None:
    file = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)  # which has no reads that leave the page cache alone
    uncached = Uncached()
    uncached.write(file, memoryview(b"x" * 5000), 0)
    into = memoryview(bytearray(5000))
    assert uncached.read(file, into, 0) == 5000 and into == b"x" * 5000
    os.close(file)
