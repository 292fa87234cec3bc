"""Two live iterators of one loader work, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import RandomSampler

from tests.contracts.checks import NOTHING, differences
from tests.contracts.datasets import Costly, Recorded
from tests.contracts.modes import EVERY, MINATO, Mode


def _flat(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


@pytest.mark.parametrize("mode", EVERY, ids=lambda mode: mode.name)
def test_interleaved(mode: Mode) -> None:
    sampler = Recorded(RandomSampler(range(30)))
    loader = mode.loader(Costly(30), 4, sampler=sampler, num_workers=2)
    pairs = list(zip(loader, loader, strict=True))
    for number, order in enumerate(sampler.epochs):
        assert differences(order, _flat(pair[number] for pair in pairs)) == NOTHING
    assert len(sampler.epochs) == 2


@pytest.mark.parametrize("mode", EVERY, ids=lambda mode: mode.name)
def test_one_is_left_while_the_other_goes_on(mode: Mode) -> None:
    loader = mode.loader(Costly(60), 4, num_workers=2)
    first, second = iter(loader), iter(loader)
    head = [next(first) for _ in range(3)]
    next(second)
    del second
    assert differences(range(60), _flat([*head, *first])) == NOTHING


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_with_persistent_workers(mode: Mode) -> None:
    """Unlike PyTorch, whose second ``iter`` takes the workers away from the first."""
    loader = mode.loader(Costly(30), 4, num_workers=2, persistent_workers=True)
    first, second = iter(loader), iter(loader)
    one = [next(first) for _ in range(2)]
    two = [next(second) for _ in range(3)]
    assert differences(range(30), _flat([*one, *first])) == NOTHING
    assert differences(range(30), _flat([*two, *second])) == NOTHING
    assert differences(range(30), _flat(loader)) == NOTHING


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_of_two_loaders_over_one_data_set(mode: Mode) -> None:
    data = Costly(30)
    pairs = list(zip(mode.loader(data, 4, num_workers=2), mode.loader(data, 4, num_workers=1), strict=True))
    for number in range(2):
        assert differences(range(30), _flat(pair[number] for pair in pairs)) == NOTHING
