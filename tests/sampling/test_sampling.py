"""From samplers to tickets: occurrences, speculation without side effects, what was delivered, and what a save takes
of a sampler with a state."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from minato_gpu import DataLoader
from minato_gpu.lanes.base import NoSample
from minato_gpu.samples import key_digest
from minato_gpu.sampling.delivered_positions import DeliveredPositions
from minato_gpu.sampling.epoch_batches import EpochBatches
from minato_gpu.sampling.occurrences import Occurrences
from minato_gpu.sampling.order import Order
from minato_gpu.sampling.speculation import Speculation
from minato_gpu.scheduling.spans import joined
from tests.contracts.samplers import Counting
from tests.support.calls import operations_of


def test_batches_with_positions_and_occurrences() -> None:
    order: Any = [[4, 5], (5, "a"), [], [5, 4, "a"]]
    data: Any = [None]
    epoch = EpochBatches(DataLoader(data, batch_sampler=order, num_workers=1), 0, 5, Order(iter(order)))
    drawn = list(iter(epoch.draw, None))
    assert [list(each.positions) for each in drawn] == [[0, 1], [2, 3], [4], [5, 6, 7]]
    assert [each.occurrences for each in drawn] == [None, [1, 0], None, [2, 1, 1]]
    assert drawn[1].keys == [5, "a"] and isinstance(drawn[2].keys[0], NoSample)


def test_an_iteration_goes_on_after_an_item_that_is_no_batch() -> None:
    batches: Any = [[0, 1], 5, [2, 3]]
    iterator = iter(DataLoader(range(10), batch_sampler=batches))  # type: ignore[arg-type]
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(TypeError, match="not iterable"):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[2, 3]]


def test_keys_with_equal_elements_are_one_key() -> None:
    """A batch sampler may cut a tensor into pieces: what a sample draws must not depend on where its key lies."""
    alike = [3, np.int64(3), torch.tensor(3), np.array(3), torch.tensor([1, 3])[1]]
    assert Occurrences(10, unique=False).count(alike) == [0, 1, 2, 3, 4]
    assert {key_digest(key) for key in alike} == {key_digest(3)}
    for make in (
        lambda: torch.tensor([1.5, 2]),
        lambda: np.array([1, 2]),
        lambda: (torch.tensor(1), "a"),
        lambda: [torch.tensor([1])],
        lambda: np.array(["a", None], object),
    ):
        assert Occurrences(10, unique=False).count([make(), make()]) == [0, 1]
        assert key_digest(make()) == key_digest(make())
    unlike = [torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[1, 2]]), torch.tensor([2])]
    assert len({key_digest(key) for key in unlike}) == 4
    assert Occurrences(10, unique=False).count(unlike) is None, "each for the first time"


def _own() -> torch.Generator:
    return torch.Generator().manual_seed(8)


def _loader(*arguments: Any, **more: Any) -> Any:
    return torch.utils.data.DataLoader(*arguments, **more)


_LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: _loader(range(30), 4, shuffle=True),
    "shuffled, own generator": lambda: _loader(range(30), 4, shuffle=True, generator=_own()),
    "sampler with its own": lambda: _loader(range(30), 4, sampler=RandomSampler(range(30), generator=_own())),
    "two generators": lambda: _loader(
        range(30),
        4,
        sampler=RandomSampler(range(30), generator=_own()),
        generator=_own(),
    ),
    "drawn while it runs": lambda: _loader(
        range(100),
        4,
        sampler=RandomSampler(range(100), replacement=True, num_samples=90, generator=_own()),
    ),
    "single keys": lambda: _loader(range(30), None, shuffle=True),
}


def states(loader: Any) -> list[bytes]:
    """The states of all generators involved."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler.sampler
    found = [loader.generator, getattr(sampler, "generator", None)]
    return [(torch.default_generator if g is None else g).get_state().numpy().tobytes() for g in found]


def plainly(loader: Any, draws_seed: bool) -> tuple[int, list[Any], list[bytes]]:
    """Seed, order and final states when all is drawn at the right time, as PyTorch does."""
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()) if draws_seed else 0
    return seed, list(loader._index_sampler), states(loader)


@pytest.mark.parametrize(("ahead", "draws_seed"), [(0, True), (5, False), (100, True)])
@pytest.mark.parametrize("make", _LOADERS.values(), ids=_LOADERS.keys())
def test_drawn_ahead_is_as_drawn_at_the_right_time(make: Callable[[], Any], ahead: int, draws_seed: bool) -> None:
    """The order, the seed, and where the generators stand at the end; nothing moves before the epoch begins."""
    torch.manual_seed(3)
    expected = plainly(make(), draws_seed)
    torch.manual_seed(3)
    loader = make()
    before = states(loader)
    speculation = Speculation(loader, draws_seed=draws_seed)
    order = list(itertools.islice(speculation, ahead))
    assert states(loader) == before, "speculation moved a generator"
    assert speculation.holds()
    speculation.adopt()
    order += list(speculation)
    assert (speculation.seed, order, states(loader)) == expected


def _set(record: DeliveredPositions) -> set[int]:
    return set(range(record.low)) | {position for lo, hi in record.above for position in range(lo, hi)}


_ORDERS = st.permutations(range(40)).flatmap(lambda order: st.tuples(st.just(order), st.integers(1, 7)))


@given(_ORDERS)
def test_any_order_of_delivery(case: tuple[list[int], int]) -> None:
    order, size = case
    record = DeliveredPositions()
    seen: list[set[int]] = [set()]
    for start in range(0, 40, size):
        batch = sorted(order[start : start + size])
        record.add(joined((position, position + 1) for position in batch))
        seen.append(seen[-1] | set(batch))
        assert _set(record) == seen[-1] and record.samples == len(seen[-1])
        assert record.batches == len(seen) - 1
        left = {position for lo, hi in record.left_of(5, 33) for position in range(lo, hi)}
        assert left == set(range(5, 33)) - seen[-1]
        for back in range(len(seen)):
            before = record.rewound(back)
            assert _set(before) == seen[-1 - back] and before.batches == record.batches - back
        assert DeliveredPositions.of_bits(record.batches, record.low, record.bits()).above == record.above
    assert (record.low, record.above, record.bits()) == (40, [], b"")


def test_going_back_counts_what_the_consumer_got() -> None:
    """A batch that was left out, or raised, goes with the one before it."""
    record = DeliveredPositions()
    for start in (0, 4, 8):
        record.add([(start, start + 4)], returned=start != 4)
    assert [(back.batches, back.low) for back in map(record.rewound, range(3))] == [(3, 12), (2, 8), (0, 0)]
    with pytest.raises(ValueError, match="the last 2 can be taken back"):
        record.rewound(3)


def test_generators_are_kept_as_they_were_when_the_order_began() -> None:
    """And not as they were when the iterator was made: another one draws in between."""
    data: Any = range(12)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(data, 2, shuffle=True, generator=generator)
    iterator = iter(loader)
    torch.rand(1, generator=generator)
    next(iterator)
    again = DataLoader(data, 2, shuffle=True, generator=torch.Generator())
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in iterator]


def test_what_a_save_costs() -> None:
    """Of sixteen times as many samples, with sixteen times as many in flight, about the same: nothing looks at each of
    them, but once. (benchmarks.saves says how long it takes.)"""
    costs = []
    for length, factor in ((1_600, 2), (25_600, 32)):
        data: Any = range(length)
        loader = DataLoader(data, 64, sampler=Counting(length), num_workers=2, prefetch_factor=factor)
        drawn = 2 * factor + 5
        costs.append([operations_of(loader.state_dict) for _ in zip(range(drawn + 15), loader, strict=False)][drawn:])
    small, large = map(max, costs)
    assert large < 2 * small
