"""Orders of epochs to come: what samplers will yield, and no trace of having asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from minato_gpu import DataLoader
from minato_gpu.caching.orders import Orders
from minato_gpu.sampling.look_ahead import DrawnOrders, orders_ahead
from minato_gpu.sampling.samplers import Sampling


def distributed(count: int, *arguments: Any, **options: Any) -> Any:
    data: Any = range(count)
    return DistributedSampler(data, *arguments, **options)


class Loader:
    """As much of a loader as tells how it samples."""

    def __init__(self, sampler: Any, batch_sampler: Any = None) -> None:
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self.dataset: Any = range(10)
        self.device, self.generator, self.drop_last = None, None, False


def sampling(sampler: Any, batch_sampler: Any = None) -> Sampling:
    loader: Any = Loader(sampler, batch_sampler)
    return Sampling(loader)


def ahead(sampler: Any, epoch: int = 0, before: Orders | None = None, **options: Any) -> Orders | None:
    return orders_ahead(sampling(sampler), epoch, before, **options)


def listed(orders: Orders | None, *epochs: int) -> list[list[int]]:
    assert orders is not None
    found = [orders.order(epoch) for epoch in epochs]
    return [order.tolist() for order in found if order is not None]


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**33),
    st.integers(0, 3),
    st.data(),
)
def test_distributed(
    count: int, ranks: int, shuffle: bool, drop_last: bool, seed: int, epoch: int, data: st.DataObject
) -> None:
    """Each rank's order is torch's own, also where a rank reads the set several times over, or nothing."""
    rank = data.draw(st.integers(0, ranks - 1))
    make = [distributed(count, ranks, each, shuffle, seed, drop_last) for each in range(ranks)]
    make[rank].set_epoch(epoch)
    state = torch.get_rng_state()
    alone, together = ahead(make[rank]), ahead(make[rank], step=3)
    told, merged = listed(alone, 0, 1, 2), listed(together, 0, 1, 2)
    assert torch.equal(torch.get_rng_state(), state) and make[rank].epoch == epoch
    for place in range(3):
        for sampler in make:
            sampler.set_epoch(epoch + place)
        orders = [list(sampler) for sampler in make]
        assert told[place] == orders[rank]
        steps = range(0, len(orders[0]), 3)
        assert merged[place] == [key for step in steps for order in orders for key in order[step : step + 3]]


def test_orders_are_equal_until_something_changes() -> None:
    def made(epoch: int = 0, count: int = 9, ranks: int = 2, rank: int = 0, seed: int = 0) -> Orders | None:
        sampler = distributed(count, ranks, rank, seed=seed)
        sampler.set_epoch(epoch)
        return ahead(sampler, 4, first)

    sampler = distributed(9, 2, 0)
    sampler.set_epoch(3)
    first = None
    first = ahead(sampler, 3)
    assert made(4) == first
    assert first not in (made(5), made(2), made(4, count=10), made(4, ranks=3), made(4, rank=1), made(4, seed=1))


def test_who_never_calls_set_epoch_gets_the_same_order_again() -> None:
    sampler = distributed(9, 2, 0)
    first = ahead(sampler, 0)
    second = ahead(sampler, 1, first)
    assert listed(second, 1, 2, 3) == [list(sampler)] * 3
    assert ahead(sampler, 2, second) == second != first
    sampler.set_epoch(3)
    assert listed(ahead(sampler, 3, second), 3) == [list(sampler)]


def drawing(generator: torch.Generator) -> Iterator[Any]:
    yield RandomSampler(range(9), generator=generator)
    yield RandomSampler(range(9), num_samples=25, generator=generator)
    yield RandomSampler(range(9), replacement=True, num_samples=70, generator=generator)
    yield SubsetRandomSampler([4, 7, 1], generator=generator)
    yield WeightedRandomSampler([0.1, 3.0, 1.0], 20, generator=generator)


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("workers", [0, 2])
def test_drawn_from_a_generator_of_its_own(kind: int, workers: int) -> None:
    """Through loaders, which draw the seeds of epochs from the same generator."""
    generator = torch.Generator().manual_seed(5)
    sampler = [*drawing(generator)][kind]
    data: Any = range(9)
    loader = DataLoader(data, 4, sampler=sampler, generator=generator, num_workers=workers)
    before: Orders | None = None
    foretold: list[list[int]] = []
    for epoch in range(4):
        if epoch == 3:
            generator.manual_seed(9)  # what was foretold does not come true
        state = generator.get_state()
        torch.empty((), dtype=torch.int64).random_(
            generator=generator
        )  # the epoch's seed, which the loader draws first
        orders = orders_ahead(Sampling(loader), epoch, before, seeds=generator)
        assert (orders is before) == (epoch in (1, 2))
        told = listed(orders, epoch, epoch + 1, epoch + 2)
        generator.set_state(state)
        assert told[0] == (foretold[0] if epoch in (1, 2) else told[0])
        assert [key for batch in loader for key in batch.tolist()] == told[0]
        before, foretold = orders, told[1:]


def test_drawn_orders_are_given_again_and_not_before_their_beginning() -> None:
    """Two tiers may ask."""
    generator = torch.Generator().manual_seed(5)
    orders = DrawnOrders(RandomSampler(range(9), generator=generator), 3, draws_seed=False)
    assert orders.order(2) is None
    assert listed(orders, 5, 3, 5)[0] == listed(orders, 5)[0]
    assert orders.order(2) is None


def test_the_same_every_time() -> None:
    assert listed(ahead(torch.utils.data.SequentialSampler(range(3))), 0, 7) == [[0, 1, 2]] * 2
    assert listed(ahead([3, 1, 1]), 2) == [[3, 1, 1]]
    assert ahead([3, 1, 1]) == ahead([3, 1, 1]) != ahead([3, 1])


def test_torchdata() -> None:
    made = pytest.importorskip("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler(range(9), 2, 1)
    assert listed(ahead(made), 0) == [list(made)]


class Own(RandomSampler):
    """What a sampler of another class does, nobody knows."""


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(9)),  # draws from the global generator, as others do
        Own(range(9), generator=torch.Generator()),
        ["a", 1],
        [np.int64(1), True],
        iter([1, 2]),
    ],
)
def test_what_is_not_known(sampler: Any) -> None:
    state = torch.get_rng_state()
    assert ahead(sampler) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_known_of_batches_that_others_make_or_of_other_samplers_on_a_shared_directory() -> None:
    sampler = RandomSampler(range(9), generator=torch.Generator())
    own: Any = [[1, 2], [3]]
    assert orders_ahead(sampling(None, own), 0) is None
    assert orders_ahead(sampling(None, BatchSampler(sampler, 2, False)), 0) is not None
    assert ahead(sampler, step=4) is None
