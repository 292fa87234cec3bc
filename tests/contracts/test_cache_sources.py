"""Copies of sources that stay: of data sets with several for a sample, with keys of other types, within others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Subset

from minato_gpu import Source
from tests.contracts.cached import (
    DISK,
    SAMPLES,
    Files,
    loader_of,
    of_tier,
    read,
    rows,
    sums,
    without_draws,
    write_files,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


class Shard(Files):
    """Samples that lie in a few large files; some have more than one source, and one is in all of them."""

    def __init__(self, folder: Path, *, numpy: bool = False) -> None:
        super().__init__(folder)
        data = b"".join((folder / f"{key}.bin").read_bytes() for key in range(SAMPLES))
        (folder / "shard").write_bytes(data)
        self.path: Any = np.array([str(folder / "shard")])[0] if numpy else str(folder / "shard")
        self.offsets: Any = np.arange(SAMPLES) * 700 if numpy else range(0, SAMPLES * 700, 700)

    def source(self, key: Any) -> Any:
        header, own = Source(self.path, 0, 100), Source(self.path, self.offsets[key], 700)
        return (own, header) if key % 3 else (own, header, Source(self.path, self.offsets[key] + 1, 5))


@pytest.mark.each_value
@pytest.mark.parametrize("numpy", [False, True], ids=["plain", "strings and numbers of NumPy"])
@pytest.mark.parametrize("parts", [2, 3])
def test_samples_with_several_sources_and_one_in_common(tmp_path: Path, parts: int, numpy: bool) -> None:
    """The first sample tells how many are kept of each."""
    dataset = Shard(write_files(tmp_path / "files"), numpy=numpy)
    order = range(SAMPLES) if parts == 3 else range(SAMPLES - 1, -1, -1)
    plain, cached = loader_of(dataset, sampler=order), loader_of(dataset, 10**6, sampler=order)
    for _ in range(2):
        assert without_draws(rows(cached)) == without_draws(rows(plain))
    thirds = SAMPLES // 3
    assert of_tier(cached)["copies"] == SAMPLES + 1 + (thirds if parts == 3 else 0)
    assert read(cached) == (0 if parts == 3 else thirds)


class Sampler:
    """Keys as something else than Python's whole numbers."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __iter__(self) -> Iterator[Any]:
        return iter([self.of(key) for key in np.random.default_rng(1).permutation(SAMPLES).tolist()])

    def __len__(self) -> int:
        return SAMPLES


@pytest.mark.parametrize(("of", "kept"), [(np.int64, True), (np.uint8, True), (str, False)])
def test_keys_of_other_types(folder: Path, tmp_path: Path, of: Any, kept: bool) -> None:
    """In memory those of whole numbers are kept, on disk all."""
    for cache, where in ((10**6, None), (DISK, tmp_path / "cache")):
        loader = loader_of(Files(folder), cache, where, sampler=Sampler(of))
        for _ in range(2):
            assert sorted(without_draws(rows(loader))) == sums(folder)
        assert read(loader) == (0 if kept or where is not None else SAMPLES)


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("who", ["the program", "the worker"])
def test_paths_that_are_not_absolute_are_of_the_directory_at_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, who: str
) -> None:
    """As without a cache, which must not give one file's bytes for another's."""
    one, two = (write_files(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two")))
    monkeypatch.chdir(one)
    cache, where = (10**6, None) if tier == "memory" else (DISK, tmp_path / "cache")
    if who == "the program":
        loader = loader_of(Files(Path()), cache, where)
        for folder in (one, two, one):
            monkeypatch.chdir(folder)
            assert sorted(without_draws(rows(loader))) == sums(folder)
    else:
        loader = loader_of(Files(Path()), cache, where, worker_init_fn=lambda _: os.chdir(two))
        for _ in range(2):
            assert sorted(without_draws(rows(loader))) == sums(two)


def test_data_sets_within_others(folder: Path) -> None:
    data: Any = Files(folder)
    within: Any = ConcatDataset([Subset(data, range(30, SAMPLES)), Subset(data, range(30))])
    loader = loader_of(within, 10**6)
    for _ in range(2):
        assert sorted(without_draws(rows(loader))) == sums(folder)
    assert read(loader) == 0
