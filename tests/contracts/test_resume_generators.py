"""Save and resume while others draw in between: where the generators stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from minato_gpu import DataLoader
from tests.contracts.datasets import Made, draw, rows
from tests.contracts.resuming import DATA, after, generator, loader_of, through_json, values
from tests.contracts.samplers import KeyByKey, Unknown


def test_asked_before_it_goes_on() -> None:
    """Between load_state_dict and iter a state is the one that was loaded, and no other."""
    state = after(loader_of(), 5)
    for loader in (loader_of(), loader_of()):
        list(loader)
        loader.load_state_dict(state)
        assert through_json(loader.state_dict()) == state
        with pytest.raises(ValueError, match="ahead=1: nothing has been delivered since load_state_dict"):
            loader.state_dict(ahead=1)
        assert len(list(loader)) == 5


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("batches", [0, 3])
def test_two_loaders_that_draw_from_one_generator(batches: int, shared: bool) -> None:
    """Both iterators are made before either draws its order: torch's global generator, or one of the user's."""

    def make() -> list[Any]:
        torch.manual_seed(0)
        one = generator() if shared else None
        return [loader_of(shuffle=True, generator=one) for _ in range(2)]

    loaders = make()
    together = zip(*loaders, strict=True)
    first = [[batch.tolist() for batch in next(together)] for _ in range(batches)]
    states = [through_json(loader.state_dict()) for loader in loaders]
    rest = [[batch.tolist() for batch in pair] for pair in together]
    following = [values(loader) for loader in loaders] if shared else []
    resumed = make()
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    got = [[batch.tolist() for batch in pair] for pair in zip(*resumed, strict=True)]
    if batches:
        assert got == rest and ([values(loader) for loader in resumed] if shared else []) == following
    for which in range(2):
        assert sorted(index for pair in first + got for index in pair[which]) == DATA


class Permuted(Unknown):
    """A sampler of the user's own with a generator, which it draws from in every epoch."""

    def __init__(self, own: torch.Generator) -> None:
        super().__init__()
        self.generator = own

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize("shared", [False, True])
def test_epochs_after_a_stored_order(shared: bool) -> None:
    """What is stored is not drawn again: the generator stands where it did once the order had been drawn."""

    def make() -> Any:
        own = generator()
        return loader_of(Permuted(own), generator=own if shared else generator(3))

    whole = make()
    reference, seeds = [], []
    for _ in range(3):
        reference.append(values(whole))
        seeds.append(whole._session.progress.state(0)["seed"])
    for step in (0, 3, 10):
        loader = make()
        state = after(loader, step)
        resumed = make()
        resumed.load_state_dict(state)
        state = after(resumed, 0)  # and saved once more
        resumed = make()
        resumed.load_state_dict(state)
        found = []
        for epoch in range(3):
            found.append(values(resumed))
            assert resumed._session.progress.state(0)["seed"] == seeds[epoch]
        assert found == [reference[0][step:], *reference[1:]]


@pytest.mark.parametrize("persistent", [False, True])
def test_after_set_epoch_samples_have_the_next_epochs_content(persistent: bool) -> None:
    def make() -> Any:
        data = Made(8, draw)
        arguments: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent, "generator": generator()}
        return DataLoader(data, 4, sampler=DistributedSampler(data, 1, 0), **arguments)

    whole = make()
    list(whole)
    whole.sampler.set_epoch(1)
    reference = [rows([batch]) for batch in whole]
    resumed = make()
    resumed.load_state_dict(after(make(), 1))
    resumed.sampler.set_epoch(1)
    with pytest.warns(UserWarning, match=r"set_epoch\(1\) has been called since"):
        iterator = iter(resumed)
    assert [rows([batch]) for batch in iterator] == reference
    assert resumed.state_dict()["epoch"] == 2


class _Few(KeyByKey):
    """Five keys, one of four each."""

    def __init__(self, seed: int) -> None:
        super().__init__(5)
        self.generator.manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        yield from (key % 4 for key in super().__iter__())


def test_few_keys_that_follow_by_chance() -> None:
    """An epoch's last key may come from a generator that is elsewhere: the epoch after it must be right as well."""
    for seed in range(12):
        loader: Any = DataLoader(DATA, 4, sampler=_Few(seed))
        iterator = iter(loader)
        next(iterator)
        resumed: Any = DataLoader(DATA, 4, sampler=_Few(seed))
        resumed.load_state_dict(through_json(loader.state_dict()))
        assert values(resumed) == values(iterator)
        assert values(resumed) == values(loader), seed
