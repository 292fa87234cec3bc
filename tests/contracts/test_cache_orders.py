"""Copies in memory, kept by the orders that samplers will draw: as many hits as the policy has, the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler

from benchmarks.cache_replay import Items, run_epoch
from minato_gpu.caching.choice import new_policy
from tests.contracts.cached import PAGE, Files, close, loader_of, of_tier, rows, sums, without_draws, write_files

_SAMPLES = 192
_EPOCHS = 4
_KEPT = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"), _SAMPLES)


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato_gpu.sources.placing.LOOKED", 0)  # the page cache has these files
    monkeypatch.setattr("minato_gpu.engine.building.READ_AHEAD", 8)  # of few samples all would be there at once


def fewer(generator: Any, samples: int) -> Any:
    return RandomSampler(range(samples), num_samples=samples // 4, generator=generator)


def weighted(generator: Any, samples: int) -> Any:
    weights = np.random.default_rng(7).lognormal(0.0, 1.0, samples)
    return WeightedRandomSampler(weights.tolist(), samples, generator=generator)


class Drawn:
    """Orders that have been delivered."""

    def __init__(self, orders: list[list[int]]) -> None:
        self.orders = [np.array(order) for order in orders]

    def order(self, epoch: int) -> Any:
        return self.orders[epoch] if epoch < len(self.orders) else None


def simulated(policy: str, orders: list[list[int]], look_ahead: int) -> list[int]:
    """The hits of each epoch."""
    items, found = Items.equal(_SAMPLES), []
    kept = new_policy(policy, _KEPT * int(items.nbytes[0]), _SAMPLES)
    for number, order in enumerate(Drawn(orders).orders):
        start = kept.begin(number, Drawn(orders), look_ahead)
        found.append(len(run_epoch(kept, order, items, start)))
    return found


@pytest.mark.parametrize("kind", [fewer, weighted])
@pytest.mark.parametrize("owns", [True, False], ids=["own generator", "the global one"])
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_as_many_hits_as_simulated(folder: Path, kind: Any, owns: bool, persistent: bool) -> None:
    """And what is delivered, and how generators move, is as without a cache."""
    found: list[tuple[Any, Any, Any]] = []
    hits, shared, read = [0], 0, 0
    for cache in (None, _KEPT * PAGE):
        torch.manual_seed(11)
        generator = torch.Generator().manual_seed(5) if owns else None
        sampler = kind(generator, _SAMPLES)
        loader = loader_of(Files(folder, _SAMPLES), cache, sampler=sampler, persistent_workers=persistent)
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
    best, first = simulated("next-use", orders, 4 * _SAMPLES // len(orders[0])), simulated("minio", orders, 0)
    # in the first epoch sizes are not known yet; bytes that are there for another sample count as shared; and where
    # workers stay, some of the next epoch may have been read ahead
    beyond = hits[-1] + shared + read - sum(len(order) for order in orders)
    assert tier["policy"] == "next-use"
    assert beyond >= 0
    assert 0.9 * sum(best[1:]) <= hits[-1] - hits[1] + shared <= 1.1 * sum(best[1:]) + beyond
    assert hits[-1] - hits[1] > 1.15 * sum(first[1:])


def test_weights_of_a_large_set_reach_the_reader_process(tmp_path: Path) -> None:
    """More than a message takes."""
    samples = 100_000
    folder = write_files(tmp_path / "files", 10)

    class Large(Files):
        def source(self, key: Any) -> Any:
            return super().source(key % 10)

    torch.manual_seed(3)
    sampler = WeightedRandomSampler([1.0] * samples, 64)
    loader = loader_of(Large(folder, samples), 5 * PAGE, sampler=sampler)
    for _ in range(2):
        assert len(rows(loader)) == 64
    assert of_tier(loader)["policy"] == "next-use"


def test_the_sampler_is_another_one_each_epoch(folder: Path) -> None:
    """Weights, length and generator change: everything comes, and is counted."""
    sampler = weighted(torch.Generator().manual_seed(5), _SAMPLES)
    loader = loader_of(Files(folder, _SAMPLES), _KEPT * PAGE, sampler=sampler, persistent_workers=True)
    expected, reads = dict(sums(folder, _SAMPLES)), 0
    for number in range(5):
        if number == 1:
            sampler.weights[: _SAMPLES // 2] = 0.0
        elif number == 2:
            sampler.num_samples = 40
        elif number == 3:
            sampler.generator = torch.Generator().manual_seed(9)
        elif number == 4:
            sampler.generator = None
        got = without_draws(rows(loader))
        assert len(got) == sampler.num_samples
        assert all(expected[key] == crc for key, crc in got)
        reads += len(got)
    close(loader)
    tier, stats = of_tier(loader), loader.stats()["reads"]
    assert tier["hits"] + tier["misses"] + stats["shared"] >= reads
    assert stats["failed"] == stats["by_workers"] == 0


class Told:
    """A sampler that says what it will yield."""

    def __init__(self) -> None:
        self.epoch = 0
        self.orders = Quarters()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.orders.order(self.epoch))

    def __len__(self) -> int:
        return _SAMPLES // 4


class Quarters:
    """A quarter of the set each epoch."""

    def order(self, epoch: int) -> list[int]:
        found: list[int] = np.random.default_rng(epoch).permutation(_SAMPLES)[: _SAMPLES // 4].tolist()
        return found


def test_a_sampler_that_tells_its_orders(folder: Path) -> None:
    sampler: Any = Told()
    loader = loader_of(Files(folder, _SAMPLES), _KEPT * PAGE, sampler=sampler, persistent_workers=True)
    orders, hits = [], [0]
    for number in range(10):
        sampler.set_epoch(number + 2)
        orders.append([row[0] for row in rows(loader)])
        hits.append(of_tier(loader)["hits"])
    close(loader)
    assert of_tier(loader)["policy"] == "next-use"
    assert hits[-1] - hits[1] == pytest.approx(sum(simulated("next-use", orders, 16)[1:]), abs=8)


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_going_on_in_an_epoch_whose_order_was_foretold(folder: Path, persistent: bool) -> None:
    def made(cache: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        more = {"sampler": weighted(generator, _SAMPLES), "generator": generator, "persistent_workers": persistent}
        return loader_of(Files(folder, _SAMPLES), cache, **more)

    plain, loader = made(None), made(_KEPT * PAGE)
    expected = [rows(plain) for _ in range(3)]
    assert rows(loader) == expected[0]
    iterator = iter(loader)
    begun = rows([next(iterator) for _ in range(6)])
    state = loader.state_dict()
    del iterator
    for each in (loader, made(_KEPT * PAGE)):
        each.load_state_dict(state)
        assert begun + rows(each) == expected[1]
        assert rows(each) == expected[2]
        assert of_tier(each)["policy"] == "next-use"
        close(each)
    close(plain)
