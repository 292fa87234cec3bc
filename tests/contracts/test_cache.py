"""Copies of sources that stay for later epochs: everything comes as without, and what is kept is not read again."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from benchmarks.cache_replay import Items, replay
from minato_gpu.analysis.virtual_epochs import Shuffles
from tests.contracts.cached import (
    DISK,
    PAGE,
    SAMPLES,
    Files,
    close,
    loader_of,
    of_tier,
    read,
    rows,
    sums,
    without_draws,
    write_files,
)
from tests.contracts.modes import BOUNDED_8, BOUNDED_8_THREADS, IN_ORDER, IN_ORDER_THREADS, Mode

_MODES = (IN_ORDER, BOUNDED_8, IN_ORDER_THREADS, BOUNDED_8_THREADS)
_TIERS: dict[str, Any] = {
    "memory": 100 * PAGE,
    "little memory": 20 * PAGE,
    "disk": {"disk": DISK},
    "both": {"memory": 20 * PAGE, "disk": DISK},
}
_THIRD = 20 * PAGE  # a budget for 20 of 60 samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("tier", _TIERS)
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mode", _MODES, ids=lambda mode: mode.name)
def test_everything_comes_as_without(
    folder: Path, tmp_path: Path, mode: Mode, workers: int, persistent: bool, tier: str
) -> None:
    cache = _TIERS[tier]
    where = tmp_path / "cache" if isinstance(cache, dict) else None
    more = {**dict(mode.arguments), "num_workers": workers, "persistent_workers": persistent, "epochs": 3}
    plain, cached = loader_of(Files(folder), **more), loader_of(Files(folder), cache, where, **more)
    for _ in range(3):
        expected, got = rows(plain), rows(cached)
        if not mode.processes:  # threads draw from one generator
            expected, got = without_draws(expected), without_draws(got)
        assert (sorted(got) if mode.lateness else got) == (sorted(expected) if mode.lateness else expected)
    for loader in (plain, cached):
        close(loader)
    kept = 20 if tier == "little memory" else SAMPLES
    reads = [SAMPLES, SAMPLES - kept, SAMPLES - kept]
    assert sum(reads) >= read(cached) >= (reads[2] if not persistent else SAMPLES)
    if "memory" in cached.stats()["cache"]:
        assert of_tier(cached)["copies"] == (SAMPLES if tier == "memory" else 20)


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (100 * PAGE, [60, 0, 0]),
        (_THIRD, [60, 40, 40]),
        ({"disk": DISK}, [60, 0, 0]),
        ({"memory": _THIRD, "disk": DISK}, [60, 0, 0]),
    ],
    ids=["memory", "little memory", "disk", "both"],
)
def test_what_is_kept_is_not_read_again(folder: Path, tmp_path: Path, cache: Any, expected: list[int]) -> None:
    """Although workers, and the process that reads ahead, end with each epoch."""
    loader = loader_of(Files(folder), cache, tmp_path / "cache" if isinstance(cache, dict) else None)
    found = []
    for _ in expected:
        assert sorted(without_draws(rows(loader))) == sums(folder)
        found.append(read(loader))
    assert found == expected
    if isinstance(cache, int):
        assert of_tier(loader)["hits"] == SAMPLES - expected[-1]
        return
    again = loader_of(Files(folder), DISK, tmp_path / "cache")  # another run
    assert sorted(without_draws(rows(again))) == sums(folder)
    assert read(again) == (0 if "memory" not in cache else 20)


def test_workers_that_persist_have_what_is_kept_too(folder: Path) -> None:
    loader = loader_of(Files(folder), _THIRD, persistent_workers=True, epochs=3)
    for _ in range(3):
        assert sorted(without_draws(rows(loader))) == sums(folder)
    close(loader)
    stats = loader.stats()["reads"]  # the next epoch's bytes are wanted while this one's are there yet: they are shared
    assert read(loader) + of_tier(loader)["hits"] + stats["shared"] == 3 * SAMPLES
    assert read(loader) == of_tier(loader)["misses"] <= 60 + 40 + 40
    assert of_tier(loader)["copies"] == 20


@pytest.mark.parametrize("change", ["size", "time"])
def test_a_file_that_has_changed_is_read_anew_by_the_tier_on_disk(tmp_path: Path, change: str) -> None:
    folder = write_files(tmp_path / "files")
    loader = loader_of(Files(folder), DISK, tmp_path / "cache")
    rows(loader)
    for key in (3, 50):
        file = folder / f"{key}.bin"
        before = file.stat()
        data = bytes(before.st_size + (change == "size"))
        file.write_bytes(data)
        moved = 0 if change == "size" else 1
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + moved))
    for reads in (2, 0):
        assert sorted(without_draws(rows(loader))) == sums(folder)
        assert read(loader) == reads
    assert of_tier(loader, "disk")["stale"] == 0, "of the last epoch"


def test_an_epoch_that_is_left_keeps_what_it_has_read(folder: Path) -> None:
    loader = loader_of(Files(folder), 10**6)
    for leave in (0, 2, 4):
        for number, batch in enumerate(loader):
            assert set(without_draws(rows([batch]))) <= set(sums(folder))
            if number == leave:
                break
    assert sorted(without_draws(rows(loader))) == sums(folder)
    assert rows(loader)
    assert read(loader) == 0


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_going_on_from_a_state(folder: Path, persistent: bool) -> None:
    """With copies of an epoch before, and without."""
    whole = loader_of(Files(folder), persistent_workers=persistent)
    expected = [rows(whole), rows(whole)]
    loader = loader_of(Files(folder), _THIRD, persistent_workers=persistent)
    assert rows(loader) == expected[0]
    iterator = iter(loader)
    begun = rows([next(iterator) for _ in range(3)])
    state = loader.state_dict()
    del iterator
    for each in (loader, loader_of(Files(folder), _THIRD, persistent_workers=persistent)):
        each.load_state_dict(state)
        assert begun + rows(each) == expected[1]
        assert sorted(without_draws(rows(each))) == sums(folder)
        close(each)
    close(whole)


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_two_live_iterators_of_one_loader(folder: Path, persistent: bool) -> None:
    loader = loader_of(Files(folder), 10**6, persistent_workers=persistent)
    for _ in range(2):
        first, second = iter(loader), iter(loader)
        got: list[list[Any]] = [[], []]
        for batches in zip(first, second, strict=True):
            for found, batch in zip(got, batches, strict=True):
                found += rows([batch])
        assert [sorted(without_draws(found)) for found in got] == [sums(folder)] * 2
        del first, second
    assert sorted(without_draws(rows(loader))) == sums(folder)
    assert of_tier(loader)["hits"] >= SAMPLES, "one of them had the copies, and the next loop has them again"
    close(loader)


def test_a_pickled_loader_keeps_its_own(folder: Path) -> None:
    loader = loader_of(Files(folder), 10**6)
    rows(loader)
    other = pickle.loads(pickle.dumps(loader))
    for reads in (SAMPLES, 0):
        assert sorted(without_draws(rows(other))) == sums(folder)
        assert read(other) == reads
    rows(loader)
    assert read(loader) == 0


def test_processes_that_are_not_forked_have_what_is_kept(folder: Path, tmp_path: Path) -> None:
    cache = {"memory": _THIRD, "disk": DISK}
    loader = loader_of(Files(folder), cache, tmp_path / "cache", multiprocessing_context="forkserver")
    for reads in (SAMPLES, 0):
        assert sorted(without_draws(rows(loader))) == sums(folder)
        assert read(loader) == reads
    assert of_tier(loader)["hits"] == 20


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_are_hit_as_often_as_simulated(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is a loader with a tier of its own, here one after the other."""
    monkeypatch.setattr("minato_gpu.sources.placing.LOOKED", 0)  # the page cache has these files
    samples, epochs = 240, 8
    data: Any = Files(write_files(tmp_path / "files", samples), samples)
    expected = set(sums(data.folder, samples))
    rates = []
    for rank in range(ranks):
        sampler: Any = DistributedSampler(data, ranks, rank, shuffle=True)
        loader = loader_of(data, samples // 4 * PAGE, sampler=sampler, persistent_workers=True)
        before = 0
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            assert set(without_draws(rows(loader))) <= expected
            hits = of_tier(loader)["hits"]
            rates.append(hits - before) if epoch >= epochs // 2 else None
            before = hits
        assert of_tier(loader)["policy"] == "next-use"
        close(loader)
    simulated = [
        len(each)
        for seed in range(4)
        for each in replay("next-use", Shuffles(samples, ranks, seed), Items.equal(samples), 0.25, epochs)[
            epochs // 2 :
        ]
    ]
    assert np.mean(rates) == pytest.approx(np.mean(simulated), abs=0.06 * samples / ranks)
