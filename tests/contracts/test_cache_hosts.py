"""Hosts with directories of their own, each of which reads a share of every epoch: as many hits as simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from benchmarks.cache_replay import Items, replay_on_disk
from minato_gpu.caching.choice import bound
from minato_gpu.sampling.look_ahead import DistributedOrders
from minato_gpu.sources.disk.tier import DiskTier
from tests.contracts.cached import Files, close, loader_of, of_tier, rows

_SAMPLES, _NBYTES = 400, 40_960
_HOSTS, _SHARE = 4, 0.25
_EPOCHS, _STEADY = 10, 5
_INDEX = 200_000  # bytes, by which that of so few copies grows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    for key in range(_SAMPLES):
        np.full(_NBYTES, key % 256, np.uint8).tofile(made / f"{key}.bin")
    return made


@pytest.fixture
def budget(tmp_path: Path) -> int:
    """Of a directory that has room for a quarter of the set."""
    guess = 8 << 20
    tier = DiskTier(tmp_path / "empty", guess)
    wanted, room = round(_SHARE * _SAMPLES) * _NBYTES, tier.room()[0]
    tier.close()
    return guess - (room - wanted - _INDEX) * 128 // 127  # what is not for copies grows with it


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch, written_at_once: None) -> None:
    monkeypatch.setattr("minato_gpu.engine.building.READ_AHEAD", 8)  # of few samples all would be there at once


def host(folder: Path, directory: Path, budget: int, rank: int, **more: Any) -> tuple[Any, Any]:
    data: Any = Files(folder, _SAMPLES)
    sampler: Any = DistributedSampler(data, _HOSTS, rank, seed=3)
    return sampler, loader_of(data, budget, directory, sampler=sampler, **more)


def simulated(rank: int) -> float:
    """The hit rate of the steady epochs."""
    orders = DistributedOrders(_SAMPLES, True, False, 3, rank, _HOSTS, 0, 1)
    found = replay_on_disk(orders, Items.equal(_SAMPLES), _SHARE, _EPOCHS, _HOSTS)
    return float(np.mean([len(hit) for hit in found[_STEADY:]])) / (_SAMPLES // _HOSTS)


def test_each_host_hits_what_is_simulated(folder: Path, tmp_path: Path, budget: int) -> None:
    """Two of the four, which need nothing of each other: each reads its own share into its own directory."""
    rates = []
    ranks = (0, _HOSTS - 1)
    for rank in ranks:
        sampler, loader = host(folder, tmp_path / f"{rank}", budget, rank, persistent_workers=True)
        reads = []
        for epoch in range(_EPOCHS):
            sampler.set_epoch(epoch)
            assert sorted(row[0] for row in rows(loader)) == sorted(sampler)
            reads.append(loader.stats()["reads"]["reads"])
        close(loader)
        rates.append(1 - (reads[-1] - reads[_STEADY - 1]) / (_EPOCHS - _STEADY) / (_SAMPLES // _HOSTS))
        tier = of_tier(loader, "disk")
        assert tier["why"].startswith("next-use: what this host reads again within 2.")
        assert tier["removed"] > 0 == tier["corrupt"] == tier["evicted"]
        assert tier["nbytes"] <= budget
    assert np.mean(rates) == pytest.approx(np.mean([simulated(rank) for rank in ranks]), abs=0.03)
    assert np.mean(rates) > 0.9 * bound(_HOSTS, _SHARE) > 2 * _SHARE


def test_a_process_that_reads_for_an_epoch_goes_on_where_the_last_one_was(
    folder: Path, tmp_path: Path, budget: int
) -> None:
    """Workers that do not persist: tables are made anew, and what was learned lies in the directory."""
    sampler, loader = host(folder, tmp_path / "0", budget, 0)
    hits = []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        assert len(rows(loader)) == _SAMPLES // _HOSTS
        tier = of_tier(loader, "disk")
        hits.append(tier["hits"])
        assert tier["why"].startswith("next-use")
        assert (tier["removed"] > 0) == (epoch > 0)
    assert np.mean(hits[3:]) > 1.5 * _SHARE * _SAMPLES / _HOSTS


@pytest.mark.parametrize(("ranks", "removes", "why"), [(2, True, "ranks 0, 1 read again"), (4, False, "one reader")])
def test_ranks_of_a_host_are_one_reader(
    folder: Path, tmp_path: Path, budget: int, ranks: int, removes: bool, why: str
) -> None:
    """Two of four read a half of each epoch; all of them the whole set."""
    hosts = [host(folder, tmp_path / "cache", budget, rank, persistent_workers=True) for rank in range(ranks)]
    for epoch in range(5):
        for sampler, loader in hosts:
            sampler.set_epoch(epoch)
            assert sorted(row[0] for row in rows(loader)) == sorted(sampler)
    for _, loader in hosts:
        close(loader)
    tiers = [of_tier(loader, "disk") for _, loader in hosts]
    assert all(why in tier["why"] for tier in tiers)
    assert (sum(tier["removed"] for tier in tiers) > 0) == removes
    assert sum(tier["hits"] for tier in tiers) > 3.5 * _SHARE * ranks * _SAMPLES / _HOSTS * (1.4 if removes else 1.0)


def test_beside_another_loader_nothing_goes(folder: Path, tmp_path: Path, budget: int) -> None:
    sampler, loader = host(folder, tmp_path / "cache", budget, 0, persistent_workers=True)
    beside = loader_of(Files(folder, 20), budget, tmp_path / "cache")
    for epoch in range(4):
        sampler.set_epoch(epoch)
        assert len(rows(loader)) == _SAMPLES // _HOSTS
        assert len(rows(beside)) == 20
    close(loader)
    tier = of_tier(loader, "disk")
    assert (tier["why"], tier["removed"]) == ("minio: another run uses the directory", 0)
    assert of_tier(beside, "disk")["hits"] == 20
