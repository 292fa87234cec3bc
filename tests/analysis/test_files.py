"""What the page cache has is asked, and storage's rate and latency come from reads that it did not answer."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest

from minato_gpu.analysis import files, probing
from minato_gpu.analysis.probing import Level, Read


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    found = [tmp_path / f"{number}.bin" for number in range(40)]
    for path in found:
        path.write_bytes(os.urandom(20_000))
    return [str(path) for path in found]


def test_files_are_dropped_and_read_in(paths: list[str], tmp_path: Path) -> None:
    files.read_in(paths, lambda: True)
    if files.cached_share(paths) is None:
        pytest.skip("this kernel has no cachestat")
    found = files.cached_share(paths)
    assert found is not None and found > 0.875
    files.drop(paths)
    left = files.cached_share(paths)
    if left == 1.0:
        pytest.skip("this file system is in memory")
    assert left == 0.0
    files.read_in(paths, lambda: False)
    assert files.cached_share(paths) == 0.0
    files.read_in([*paths, str(tmp_path / "missing")], lambda: True)
    share = files.cached_share([*paths, str(tmp_path / "missing")])
    assert share is not None and share > 0.9  # the kernel may have let a page go


def test_nothing_is_known_of_no_files() -> None:
    assert files.cached_share([]) is None


def test_nothing_is_known_where_the_kernel_does_not_tell(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "cached_bytes", lambda file: None)
    assert files.cached_share(paths) is None


def test_pieces_cover_the_files_once(paths: list[str], tmp_path: Path) -> None:
    reads = probing.pieces([*paths[:3], str(tmp_path / "missing")], 7000)
    assert sorted(reads) == sorted(
        Read(path, at, min(7000, 20_000 - at)) for path in paths[:3] for at in (0, 7000, 14_000)
    )
    assert reads[0].path != reads[1].path


def test_each_level_reads_files_of_its_own(paths: list[str]) -> None:
    ticks = count()
    levels = probing.probe(probing.pieces(paths, 20_000), 1e9, lambda: float(next(ticks)))
    if not levels:
        pytest.skip("this file system is in memory")
    assert [level.at_once for level in levels] == [1, 2, 4]  # of 40 reads there are none for 8 more
    assert all(level.nbytes == 20_000 and level.bytes_per_s > 0 for level in levels)


def test_rate_and_latency_are_told_apart() -> None:
    """Storage of 100 MB/s and 50 ms: one read of 1 MB takes 60 ms, and from six at once on the rate is the limit."""
    levels = [Level(n, max(0.06, n * 0.01), 1e6, min(n * 1e6 / 0.06, 1e8)) for n in (1, 2, 4, 8, 16)]
    rate, latency = probing.told_apart(levels)
    assert rate == pytest.approx(1e8) and latency == pytest.approx(0.05)
    far = [Level(n, 0.05, 1e5, n * 1e5 / 0.05) for n in (1, 8)]
    assert probing.told_apart(far) == (1.6e7, 0.05)  # eight at once do not reach the limit
    assert probing.told_apart([Level(1, 0.01, 1e6, 1e8)]) == (1e8, 0.0)
