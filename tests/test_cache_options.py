"""What ``cache`` and ``cache_dir`` may be, and what is said of all else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from minato_gpu import DataLoader, Source, cache_options
from minato_gpu.cache_options import CacheOptions
from minato_gpu.sources.disk import LEAST_BUDGET
from minato_gpu.sources.disk.directory import CacheDirectoryError

LEAST = LEAST_BUDGET


class Declares:
    """Ten samples of one file each."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, key: int) -> int:
        return key

    def source(self, key: int) -> Source:
        return Source(f"/nowhere/{key}")


class Stream(IterableDataset[int]):
    """Declares what nobody asks for."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def source(self, key: int) -> Source:
        return Source(f"/nowhere/{key}")


def made(cache: Any = None, cache_dir: Any = None, dataset: Any = None, **more: Any) -> CacheOptions:
    data: Any = Declares() if dataset is None else dataset
    loader: DataLoader[Any] = DataLoader(
        data,
        4,
        **{"num_workers": 1, "cache": cache, "cache_dir": cache_dir, **more},
    )
    return loader._session.options.cache


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (1, 1),
        (np.int64(5000), 5000),
        ("7", 7),
        ("7B", 7),
        ("32kb", 32_000),
        ("32 KiB", 32 << 10),
        (" 1.5 MB ", 1_500_000),
        ("1.5MiB", 3 << 19),
        (".25G", 250_000_000),
        ("1g", 10**9),
        ("1GiB", 1 << 30),
        ("0.001T", 10**9),
        ("0.001tib", (1 << 40) // 1000),
    ],
)
def test_sizes(given: Any, nbytes: int) -> None:
    assert made(given) == CacheOptions(memory_bytes=nbytes)
    assert made({"memory": given}) == CacheOptions(memory_bytes=nbytes)


@pytest.mark.parametrize(
    "text",
    ["", " ", "GB", "many", "1.2.3GB", ".", "1e9", "-1GB", "1 XB", "32iB", "32I", "1GBB", "1KMB", "9" * 400, "nan"],
)
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no number of bytes; pass a number of bytes, or a text such as '32GB'"):
        made(text)


@pytest.mark.parametrize("size", [1.5, 3e9, True, False, b"32GB", ["32GB"], {"memory": None}, {"memory": 1.0}])
def test_types_that_are_no_size(size: Any) -> None:
    with pytest.raises(TypeError, match="is no number of bytes"):
        made(size)


@pytest.mark.parametrize("size", [0, -1, "0GB", "0.1", np.int64(0), {"memory": 0}, {"disk": 0, "memory": 1}])
def test_sizes_of_nothing(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be at least 1 byte"):
        made(size, tmp_path if isinstance(size, dict) and "disk" in size else None)


@pytest.mark.parametrize("cache", [{}, {"ram": 1}, {"memory": 1, "gpu": 1}, {1: 1}])
def test_names_of_tiers_that_there_are_not(cache: Any) -> None:
    with pytest.raises(ValueError, match="must name 'memory', 'disk' or both"):
        made(cache)


def test_without_anything() -> None:
    assert made() == CacheOptions()
    assert not made()
    assert made(1)


@pytest.mark.parametrize("as_what", [str, Path, os.fspath])
def test_a_directory(tmp_path: Path, as_what: Any) -> None:
    path = tmp_path / "cache"
    whole = CacheOptions(0, LEAST, str(path))
    assert made(LEAST, as_what(path)) == made({"disk": LEAST}, as_what(path)) == whole
    assert made({"memory": 10, "disk": LEAST}, as_what(path)) == CacheOptions(10, LEAST, str(path))
    assert path.is_dir(), "it is made at construction, where what is wrong with it can still be said"


def test_a_directory_stays_the_same_wherever_the_program_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert made(LEAST, "cache").directory == str(tmp_path / "cache")


@pytest.mark.parametrize(
    ("cache", "directory", "error", "words"),
    [
        (None, "d", ValueError, "say by cache how many bytes"),
        ({"memory": 1}, "d", ValueError, "go together"),
        ({"disk": "1GB"}, None, ValueError, "go together"),
        ({"memory": 1, "disk": "1GB"}, None, ValueError, "go together"),
        (LEAST - 1, "d", ValueError, f"needs at least {LEAST} bytes"),
        ("1GB", "", ValueError, "cache_dir is empty"),
        ("1GB", 3, TypeError, "must be a path"),
        ("1GB", b"d", TypeError, "must be a path"),
    ],
)
def test_directories_that_will_not_do(
    cache: Any, directory: Any, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        made(cache, directory)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(CacheDirectoryError):
            made(LEAST, path)
    with pytest.raises(CacheDirectoryError):
        made(1 << 60, tmp_path / "cache")  # more than the disk has


def test_more_than_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_options, "memory_limit", lambda: (1000, "this job's memory limit (memory.max)"))
    assert made(1000)
    with pytest.raises(ValueError, match="is more than the 1000 bytes of this job's memory limit"):
        made(1001)


@pytest.mark.parametrize("dataset", [Subset(Declares(), [3, 1]), ConcatDataset([Declares(), Declares()])])  # type: ignore[arg-type, list-item]
def test_data_sets_that_are_seen_through(dataset: Any) -> None:
    assert made(1, dataset=dataset)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_workers": 0}, "needs num_workers > 0"),
        ({"dataset": list(range(10))}, r"give it a method source\(key\)"),
        ({"dataset": ConcatDataset([Declares(), list(range(10))])}, r"give it a method source\(key\)"),  # type: ignore[list-item]
        ({"dataset": Stream()}, "an iterable data set reads for itself"),
    ],
)
def test_loaders_that_have_nothing_to_keep(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(100, **more)
