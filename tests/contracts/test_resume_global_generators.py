"""Whose the global generators are after a resume: the user's, who may have seeded them since, or the state's. Which of
several ranks' states it is, too. See process_generators.py."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from minato_gpu import DataLoader, merge_state_dicts
from minato_gpu.checkpoint import process_generators
from tests.contracts.datasets import Made
from tests.contracts.resume_global_program import SAMPLES, seed
from tests.contracts.resuming import DATA, after, generator, loader_of, through_json


def _moved(move: Callable[[int], Any], caplog: pytest.LogCaptureFixture) -> tuple[list[str], list[str]]:
    """Which generators are not as in the state after ``iter()``, where ``move`` came before that; and what was said."""
    seed(1)
    loader = loader_of(shuffle=True)
    next(iter(loader))
    state = through_json(loader.state_dict())
    seed(2)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="minato_gpu"):
        for number in (7, 8):
            resumed = loader_of(shuffle=True)
            resumed.load_state_dict(state)
            move(number)
            there = process_generators.every()
            iter(resumed)
    saved, found = process_generators.checked(state["global"]), process_generators.every()
    assert all(found[name] in (saved[name], there[name]) for name in found)
    return [name for name in found if found[name] != saved[name]], [record.message for record in caplog.records]


def test_the_users_own_wins(caplog: pytest.LogCaptureFixture) -> None:
    """Of generators that moved after load_state_dict; each of the others goes back. Said once."""
    assert _moved(lambda _: None, caplog) == ([], [])
    moves: dict[str, Any] = {"torch": torch.manual_seed, "python": random.seed, "numpy": np.random.seed}
    for name, move in moves.items():
        which, said = _moved(move, caplog)
        assert which == [name] and len(said) == 1
        assert said[0].lower().startswith(f"{name}'s global generator") and "stays as it is" in said[0]


def test_who_sets_it_to_the_same_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A script that keeps torch.get_rng_state() with the loader's state, which was once needed."""
    torch.manual_seed(1)
    loader = loader_of(shuffle=True, num_workers=1)
    next(iter(loader))
    state, own = loader.state_dict(), torch.get_rng_state()
    resumed = loader_of(shuffle=True, num_workers=1)
    resumed.load_state_dict(state)
    torch.set_rng_state(own)
    with caplog.at_level(logging.WARNING, logger="minato_gpu"):
        iter(resumed)
    assert torch.equal(torch.get_rng_state(), own) and not caplog.records


@pytest.mark.parametrize("workers", [0, 1])
def test_nobody_elses_moves(workers: int) -> None:
    """Saving moves none, nor does a loader that is given no state; load_state_dict alone moves none, either."""
    seed(1)
    loader = loader_of(range(40), num_workers=workers, generator=generator())
    before = process_generators.every()
    loader.load_state_dict({})
    states = [loader.state_dict()]
    for _ in loader:
        states += [loader.state_dict(), loader.state_dict(ahead=1)]
    states.append(loader.state_dict())
    for state in states:
        loader_of(range(40), num_workers=workers, generator=generator()).load_state_dict(state)
    assert process_generators.every() == before


@pytest.mark.parametrize(
    "sampler",
    [
        lambda own: RandomSampler(DATA, generator=own),
        lambda own: range(40),
        lambda own: DistributedSampler(DATA, 1, 0),
    ],
)
def test_with_a_generator_of_ones_own(sampler: Callable[[Any], Any]) -> None:
    """Nothing comes from the global one: it is in no state, and left alone. Without workers a data set may draw."""

    def state_of(own: Any, workers: int) -> Any:
        loader = loader_of(sampler(generator()), num_workers=workers, generator=own)
        before, state = loader.state_dict(), after(loader, 1)
        assert bool(before.get("global")) == bool(state.get("global"))
        return state

    assert list(state_of(None, 1)["global"]) == ["torch"] and len(state_of(generator(), 0)["global"]) == 3
    state = state_of(generator(), 1)
    assert "global" not in state
    state["global"] = state_of(None, 1)["global"]
    seed(2)
    before = process_generators.every()
    loader = loader_of(sampler(generator()), num_workers=1, generator=generator())
    loader.load_state_dict(state)
    iter(loader)
    assert process_generators.every() == before


def test_a_state_without_them() -> None:
    """As earlier versions saved it: none moves."""
    for state in (loader_of().state_dict(), after(loader_of(), 1)):
        del state["global"]
        seed(2)
        before = process_generators.every()
        loader = loader_of(num_workers=0, generator=generator())
        loader.load_state_dict(state)
        iter(loader)
        assert process_generators.every() == before


def test_another_kind_of_generator_in_numpys_place() -> None:
    """It is nobody's that a state could hold, and is left alone."""
    numpys: Any = np.random
    own = numpys.get_bit_generator()
    state = after(loader_of(), 1)
    try:
        numpys.set_bit_generator(np.random.PCG64(3))
        before = np.random.get_state(legacy=False)
        assert set(after(loader_of(), 1)["global"]) == {"torch", "python"}
        loader = loader_of()
        loader.load_state_dict(state)
        iter(loader)
        assert np.random.get_state(legacy=False) == before
    finally:
        numpys.set_bit_generator(own)


# --- ranks -------------------------------------------------------------------------------------------------------


def _ranks(count: int) -> list[Any]:
    data = Made(SAMPLES, torch.tensor)
    return [DataLoader(data, 2, sampler=DistributedSampler(data, count, rank), num_workers=1) for rank in range(count)]


def _states(batches: int | None, *, alike: bool) -> tuple[list[Any], list[Any]]:
    """Of two ranks, and how their generators stood; None: before the first epoch."""
    states, generators = [], []
    for rank, loader in enumerate(_ranks(2)):
        torch.manual_seed(0 if alike else rank)
        states.append(through_json(loader.state_dict()) if batches is None else after(loader, batches))
        generators.append(torch.get_rng_state())
    return states, generators


def _resumed(state: Any, ranks: int) -> list[Any]:
    """How the generators of so many ranks stand once they go on."""
    found = []
    for loader in _ranks(ranks):
        torch.manual_seed(77)
        loader.load_state_dict(through_json(state))
        loader._session.take_pending()  # what iter() does first: it then may draw
        found.append(torch.get_rng_state())
    return found


@pytest.mark.parametrize("batches", [None, 0, 2])
def test_ranks(batches: int | None) -> None:
    """As many ranks: each its own. Others: where all stood alike; else they stay as they are, for equal ones on all
    ranks would be none that any of them had."""
    own = torch.random.manual_seed(77).get_state()
    states, generators = _states(batches, alike=False)
    merged = merge_state_dicts(states[::-1])
    assert _same(_resumed(merged, 2), generators)
    assert _same(_resumed(merged, 3), [own] * 3)
    states, generators = _states(batches, alike=True)
    merged = merge_state_dicts(states)
    assert _same(_resumed(merged, 2), generators) and _same(_resumed(merged, 3), generators[:1] * 3)


def test_a_state_of_another_rank() -> None:
    """Between epochs any rank may take it, but for its generator."""
    states, generators = _states(None, alike=False)
    assert _same(_resumed(states[1], 2), [torch.random.manual_seed(77).get_state(), generators[1]])


def _same(found: list[Any], expected: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("damage", [[1, 2], [{"torch": "x"}, {"torch": 1}], "x", {"torch": 1}])
def test_damaged_generators_of_ranks(damage: Any) -> None:
    states, _ = _states(1, alike=False)
    for loader in _ranks(2):
        with pytest.raises(ValueError, match=r"state: '(global|globals|torch)' must be"):
            loader.load_state_dict({**merge_state_dicts(states), "globals": damage})


class _Normal(torch.utils.data.Dataset[Any]):
    """An odd number of draws from a normal distribution leaves half a pair for the next sample."""

    def __init__(self, draw: Callable[[float, float], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> float:
        return self.draw(0.0, 1.0)


@pytest.mark.parametrize("draw", [random.gauss, np.random.normal], ids=["python", "numpy"])
def test_half_a_pair_of_normal_numbers_is_in_the_state(draw: Callable[[float, float], float]) -> None:
    def loader() -> Any:
        return DataLoader(_Normal(draw), batch_size=None)

    seed(1)
    whole = list(loader())
    seed(1)
    state = after(loader(), 3)
    seed(2)
    resumed = loader()
    resumed.load_state_dict(state)
    assert list(resumed) == whole[3:]
