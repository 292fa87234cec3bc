"""Copies that are kept by the orders that samplers will draw: as many hits as the policy has, the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from benchmarks.cache_replay import budget_of, policy_of, replay_on_disk
from minato_gpu.caching.choice import bound
from minato_gpu.sampling.lookahead import DistributedOrders
from tests.caching.model import hits_of
from tests.contracts.cached import PAGE, Files, close, loader_of, of_tier, rows, write_files

_SAMPLES = 192
_EPOCHS = 4
_KEPT = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"), _SAMPLES)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato_gpu.engine.builder.READ_AHEAD", 8)  # of few samples all would be there at once


def weighted(generator: Any, samples: int) -> Any:
    weights = np.random.default_rng(7).lognormal(0.0, 1.0, samples)
    return WeightedRandomSampler(weights.tolist(), samples, generator=generator)


@pytest.mark.parametrize("owns", [True, False], ids=["own generator", "the global one"])
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_as_many_hits_as_simulated(folder: Path, owns: bool, persistent: bool) -> None:
    """And what is delivered, and how generators move, is as without a cache."""
    found: list[tuple[Any, Any, Any]] = []
    hits, shared, read = [0], 0, 0
    for cache in (None, _KEPT * PAGE):
        torch.manual_seed(11)
        generator = torch.Generator().manual_seed(5) if owns else None
        sampler = weighted(generator, _SAMPLES)
        more = {"persistent_workers": persistent, "prefetch_factor": 2}  # in a longer window more bytes are shared
        loader = loader_of(Files(folder, _SAMPLES), cache, sampler=sampler, **more)
        for _ in range(_EPOCHS):
            found.append((rows(loader), generator and generator.get_state().tolist(), torch.get_rng_state().tolist()))
            if cache is not None:
                tier = of_tier(loader)
                hits.append(tier["hits"] if persistent else hits[-1] + tier["hits"])
                reads = loader.stats()["reads"]
                shared = reads["shared"] + (0 if persistent else shared)
                read = reads["reads"] + (0 if persistent else read)
        close(loader)
    assert found[:_EPOCHS] == found[_EPOCHS:]
    orders = [[row[0] for row in got] for got, _, _ in found[:_EPOCHS]]
    best, first = (
        hits_of(policy_of(name, _KEPT, _SAMPLES), orders, ahead)
        for name, ahead in (("next-use", 4 * _SAMPLES // len(orders[0])), ("minio", 0))
    )
    # in the first epoch sizes are not known yet; bytes that are there for another sample count as shared; and where
    # workers stay, some of the next epoch may have been read ahead
    beyond = hits[-1] + shared + read - sum(len(order) for order in orders)
    assert tier["policy"] == "next-use"
    assert beyond >= 0
    assert 0.9 * sum(best[1:]) <= hits[-1] - hits[1] + shared <= 1.1 * sum(best[1:]) + beyond
    assert hits[-1] - hits[1] > 1.15 * sum(first[1:])


# --- hosts with directories of their own, each of which reads a share of every epoch -----------------------------

_SHARDED, _NBYTES = 400, 40_000
_HOSTS, _SHARE = 4, 0.25
_ROUNDS, _STEADY = 10, 5


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    for key in range(_SHARDED):
        np.full(_NBYTES, key % 256, np.uint8).tofile(made / f"{key}.bin")
    return made


@pytest.fixture
def budget() -> int:
    """Of a directory that has room for a quarter of the set."""
    return budget_of(round(_SHARE * _SHARDED), _NBYTES)


def host(folder: Path, directory: Path, budget: int, rank: int, **more: Any) -> tuple[Any, Any]:
    data: Any = Files(folder, _SHARDED)
    sampler: Any = DistributedSampler(data, _HOSTS, rank, seed=3)
    return sampler, loader_of(data, budget, directory, sampler=sampler, **more)


def simulated_host(rank: int) -> float:
    """The hit rate of the steady epochs."""
    orders = DistributedOrders(_SHARDED, True, False, 3, rank, _HOSTS, 0)
    found = replay_on_disk(orders, _SHARDED, _SHARE, _ROUNDS, _HOSTS)
    return float(np.mean([len(hit) for hit in found[_STEADY:]])) / (_SHARDED // _HOSTS)


@pytest.mark.usefixtures("written_at_once")
def test_each_host_hits_what_is_simulated(large: Path, tmp_path: Path, budget: int) -> None:
    """Two of the four, which need nothing of each other: each reads its own share into its own directory."""
    rates = []
    ranks = (0, _HOSTS - 1)
    for rank in ranks:
        sampler, loader = host(large, tmp_path / f"{rank}", budget, rank, persistent_workers=True)
        reads = []
        for epoch in range(_ROUNDS):
            sampler.set_epoch(epoch)
            assert sorted(row[0] for row in rows(loader)) == sorted(sampler)
            reads.append(loader.stats()["reads"]["reads"])
        close(loader)
        rates.append(1 - (reads[-1] - reads[_STEADY - 1]) / (_ROUNDS - _STEADY) / (_SHARDED // _HOSTS))
        tier = of_tier(loader, "disk")
        assert tier["why"].startswith("next-use: what this host reads again within 2.")
        assert tier["removed"] > 0 == tier["corrupt"] == tier["evicted"]
        assert tier["nbytes"] <= budget
    assert np.mean(rates) == pytest.approx(np.mean([simulated_host(rank) for rank in ranks]), abs=0.03)
    assert np.mean(rates) > 0.9 * bound(_HOSTS, _SHARE) > 2 * _SHARE
