"""Orders of epochs to come: what samplers will yield, foretold or told by themselves, and no trace of having asked."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)

from minato_gpu import DataLoader
from minato_gpu.caching.future import Orders
from minato_gpu.sampling.lookahead import LookAhead
from minato_gpu.sampling.packing import packed_state
from minato_gpu.sources.memory_tier import Begun

KEYS = 9


def looking(sampler: Any) -> LookAhead:
    """At a loader of which only as much is there as tells how it samples."""
    loader: Any = SimpleNamespace(sampler=sampler, batch_sampler=None, dataset=range(KEYS))
    loader.device, loader.generator, loader.drop_last, loader.persistent_workers = None, None, False, True
    return LookAhead(loader)


def epoch(number: int, begun_from: dict[str, str] | None = None, position: int = 0) -> Any:
    """An epoch's source, as it begins."""
    return SimpleNamespace(number=number, position=position, order=SimpleNamespace(begun_from=begun_from))


def listed(begun: Begun, *epochs: int) -> list[list[int]]:
    """The orders of these epochs, as whoever is told of them finds them."""
    assert begun.orders is not None
    orders: Orders = pickle.loads(pickle.dumps(begun.orders))
    found = [orders.order(epoch) for epoch in epochs]
    return [order.tolist() for order in found if order is not None]


@pytest.mark.parametrize(("count", "ranks", "drop_last"), [(1, 3, False), (7, 3, False), (7, 3, True), (9, 2, False)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_distributed(count: int, ranks: int, drop_last: bool, shuffle: bool) -> None:
    """Each rank's order is torch's own, also where a rank reads the set several times over, or nothing."""
    data: Any = range(count)
    for rank in range(ranks):
        sampler: Any = DistributedSampler(data, ranks, rank, shuffle, 5, drop_last)
        sampler.set_epoch(2)
        found = listed(looking(sampler)(epoch(2)), 2, 3)
        for number in (2, 3):
            sampler.set_epoch(number)
            assert found[number - 2] == list(sampler)


DRAWING: dict[str, Any] = {
    "fewer": lambda generator: RandomSampler(range(KEYS), num_samples=4, generator=generator),
    "more": lambda generator: RandomSampler(range(KEYS), num_samples=25, generator=generator),
    "replacement": lambda generator: RandomSampler(range(KEYS), True, 70, generator=generator),
    "weighted": lambda generator: WeightedRandomSampler([0.1, 3.0, 1.0], 20, generator=generator),
    "weighted, once": lambda generator: WeightedRandomSampler([0.1, 3.0, 1.0, 0.4], 3, False, generator=generator),
}
_ONCE = ("fewer", "weighted, once")


@pytest.mark.parametrize("kind", DRAWING)
@pytest.mark.parametrize("owner", ["the sampler", "sampler and loader", "everybody"])
@pytest.mark.parametrize("workers", ["none", "fresh", "persistent"])
def test_drawn_from_a_generator(kind: str, owner: str, workers: str) -> None:
    """Through loaders, which draw the seeds of epochs from the same generator, or from another."""
    own = torch.Generator().manual_seed(5)
    torch.manual_seed(6)
    sampler = DRAWING[kind](None if owner == "everybody" else own)
    drawn = torch.default_generator if owner == "everybody" else own
    data: Any = range(KEYS)
    more: dict[str, Any] = {"num_workers": 0 if workers == "none" else 1, "persistent_workers": workers == "persistent"}
    loader = DataLoader(data, 4, sampler=sampler, generator=own if owner == "sampler and loader" else None, **more)
    look = LookAhead(loader)
    foretold: list[int] | None = None
    for number in range(4):
        if number == 2:
            drawn.manual_seed(9)  # what was foretold does not come true
            foretold = None
        state = drawn.get_state()
        begun = look(epoch(number), early=True)
        now, then = listed(begun, number, number + 1)
        assert torch.equal(drawn.get_state(), state)
        assert foretold is None or now == foretold
        assert begun.once == (kind in _ONCE)
        got = [key for batch in loader for key in batch.tolist()]
        foretold = then
        if number == 0 and workers == "persistent" and owner != "the sampler":
            foretold = None  # as they start a seed is drawn, once
        else:
            assert got == now
    assert begun.shards == pytest.approx(KEYS / len(sampler))


def test_what_is_foretold_is_drawn_once_and_given_again() -> None:
    sampler = DRAWING["fewer"](torch.Generator().manual_seed(5))
    look = looking(sampler)
    first = look(epoch(3)).orders
    assert first is not None and first.order(2) is None
    later = first.order(5)
    assert later is not None
    given = [first.order(number) for number in (3, 4, 5)]
    assert given[2] is not None and given[2].tolist() == later.tolist()
    assert list(sampler) == (given[0] if given[0] is None else given[0].tolist())
    second = look(epoch(4)).orders
    assert second == first and hash(second) == hash(first) and first == second
    list(sampler)
    list(sampler)
    assert look(epoch(5)).orders != first, "it has been drawn from once more"
    sampler._num_samples = 5
    assert look(epoch(5)).orders != first


@pytest.mark.parametrize("role", ["sampler", "default"])
def test_an_epoch_that_an_earlier_run_has_begun(role: str) -> None:
    """Its order was drawn from what the generator was then."""
    generator = torch.Generator().manual_seed(5)
    sampler = DRAWING["weighted"](generator if role == "sampler" else None)
    drawn = generator if role == "sampler" else torch.default_generator
    state = packed_state(drawn.get_state())
    expected = list(sampler)
    begun = looking(sampler)(epoch(2, {role: state}, 7))
    assert listed(begun, 2) == [expected]
    assert begun.skipped == 7
