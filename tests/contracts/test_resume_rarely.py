"""A sampler with a state whose epoch is hardly ever saved: its state is not copied, and a save loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader
from minato_gpu.sampling import sources
from tests.contracts.datasets import Made, draw, rows
from tests.contracts.modes import BOUNDED_8_THREADS, IN_ORDER, IN_ORDER_THREADS, Mode
from tests.contracts.resuming import generator, through_json
from tests.contracts.samplers import KeepsPlace, KeepsPlaceInIterator


class Learning:
    """What it yields next depends on what it was told after the batches before: only its own state has that."""

    def __init__(self) -> None:
        self.at = 0
        self.learnt = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 40:
            self.at += 1
            yield (self.at + self.learnt) % 20
        self.at = 0

    def __len__(self) -> int:
        return 40

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "learnt": self.learnt}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.learnt = state["at"], state["learnt"]


class Batches(KeepsPlace):
    """A batch sampler with a state: unequal batches, an empty one."""

    def __iter__(self) -> Iterator[Any]:
        batches = [[1, 2, 3], [4], [], [5, 6, 6, 6], [np.int64(6), 7], [8, 9, 10, 11, 6], [1]]
        while self.yielded < len(batches):
            self.yielded += 1
            yield batches[self.yielded - 1]
        self.yielded = 0

    def __len__(self) -> int:
        return 7


_SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sampler": lambda: {"batch_size": 4, "sampler": KeepsPlace()},
    "sampler, drop_last": lambda: {"batch_size": 4, "sampler": KeepsPlace(), "drop_last": True},
    "iterator": lambda: {"batch_size": 4, "sampler": KeepsPlaceInIterator()},
    "batches": lambda: {"batch_sampler": Batches(), "collate_fn": list},
    "single keys": lambda: {"batch_size": None, "sampler": KeepsPlace()},
}


@pytest.fixture(params=[0, 3])
def seldom(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves are taken to be rare after so many batches."""
    monkeypatch.setattr(sources, "OFTEN", request.param)


def _rows(batches: Any, name: str) -> list[Any]:
    if name == "single keys":
        return [[tuple(map(str, sample))] for sample in batches]
    if name == "batches":
        return [[tuple(map(str, sample)) for sample in batch] for batch in batches]
    return [[tuple(map(str, sample)) for sample in rows([batch])] for batch in batches]


def _compare(epoch: list[Any], reference: list[Any], mode: Mode) -> None:
    if mode.lateness:
        epoch, reference = ([[each] for batch in side for each in batch] for side in (epoch, reference))
        epoch, reference = sorted(epoch), sorted(reference)
    assert epoch == reference


@pytest.mark.usefixtures("seldom")
@pytest.mark.parametrize("name", _SAMPLERS)
@pytest.mark.parametrize(
    ("mode", "workers"),
    [(IN_ORDER, 0), (IN_ORDER_THREADS, 2), (BOUNDED_8_THREADS, 2)],
    ids=("inline", "in order", "bounded"),
)
def test_every_step(mode: Mode, workers: int, name: str) -> None:
    """Saved once, resumed, and saved and resumed once more one batch later, also as it was a batch before."""

    def make(state: Any = None) -> Any:
        data = Made(20, lambda key: [key])
        loader = mode.loader(data, num_workers=workers, generator=generator(), **_SAMPLERS[name]())
        if state is not None:
            loader.load_state_dict(through_json(state))
        return loader

    reference = _rows(make(), name)
    for step in range(0, len(reference) + 1, 2 if workers and len(reference) < 8 else 7 if workers else 1):
        loader = make()
        iterator = iter(loader)
        first = [next(iterator) for _ in range(step)]
        resumed = make(loader.state_dict())
        again = iter(resumed)
        second = [batch for _, batch in zip(range(1), again, strict=False)]
        if not second:  # that epoch is over
            _compare(_rows(first, name), reference, mode)
            assert len(_rows(resumed, name)) == len(reference)
        for ahead in range(2 * len(second)):
            last = make(resumed.state_dict(ahead=ahead))
            rest = list(last)
            _compare(_rows([*first, *second[: len(second) - ahead], *rest], name), reference, mode)
            assert len(_rows(last, name)) == len(reference), "the epoch after that is whole"
        _compare(_rows([*first, *iterator], name), reference, mode)


@pytest.mark.usefixtures("seldom")
def test_what_the_sampler_has_learnt_is_not_forgotten() -> None:
    """It is told something while batches are drawn ahead: those come as they were drawn, and later ones as told."""

    def make() -> Any:
        return DataLoader(Made(20, lambda key: key), 4, sampler=Learning(), num_workers=1)

    def go_on(loader: Any, iterator: Any, steps: int) -> list[Any]:
        got = []
        for _, batch in zip(range(steps), iterator, strict=False):
            got.append(batch.tolist())
            loader.sampler.learnt += 3
        return got

    whole = make()
    reference = go_on(whole, iter(whole), 10)
    loader = make()
    iterator = iter(loader)
    first = go_on(loader, iterator, 4)
    resumed = make()
    resumed.load_state_dict(through_json(loader.state_dict()))
    rest = go_on(resumed, iter(resumed), 10)
    assert [*first, *rest] == reference


@dataclass
class Asked:
    """How often a sampler was asked for its state."""

    times: int = 0


class Long(KeepsPlace):
    """400 keys, which it makes of ``make``."""

    def __init__(self, asked: Asked, make: Callable[[int], Any] = int) -> None:
        super().__init__()
        self.asked = asked
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        while self.yielded < 400:
            self.yielded += 1
            yield self.make(self.yielded - 1)
        self.yielded = 0

    def __len__(self) -> int:
        return 400

    def state_dict(self) -> dict[str, int]:
        self.asked.times += 1
        return super().state_dict()


@pytest.mark.parametrize("workers", [0, 1])
def test_nobody_saves_and_nothing_is_copied(workers: int) -> None:
    asked = Asked()
    loader = DataLoader(Made(400, lambda key: key), 4, sampler=Long(asked), num_workers=workers)
    assert sum(1 for _ in loader) == 100
    assert asked.times <= sources.OFTEN


@pytest.mark.parametrize("workers", [0, 1])
def test_a_save_at_every_step_is_of_the_delivered_batch(workers: int) -> None:
    """The first ones in the middle of an epoch say what the loader has drawn ahead; later it knows the state."""
    loader = DataLoader(Made(400, lambda key: key), 4, sampler=Long(Asked()), num_workers=workers)
    iterator = iter(loader)
    for _ in range(50):
        next(iterator)
    drawn = []
    for step in range(50, 60):
        source = loader.state_dict()["source"]
        own, keys = source["state"]["sampler"]["yielded"], [key for batch in source.get("drawn", []) for key in batch]
        assert own - len(keys) == 4 * step and keys == list(range(4 * step, own))
        drawn.append(len(keys))
        next(iterator)
    assert drawn[3:] == [0] * 7 and (drawn[0] > 0) == (workers > 0)


def test_keys_that_no_state_can_hold() -> None:
    """The sampler is asked for its state before every batch then, so that none of its keys need be stored."""
    data = Made(400, lambda key: int(key.imag))
    loader = DataLoader(data, 4, sampler=Long(Asked(), make=lambda at: complex(0, at)))
    iterator = iter(loader)
    with pytest.raises(ValueError, match="can be saved once its first batch has been delivered"):
        loader.state_dict()
    assert list(next(iterator)) == [0, 1, 2, 3]
    assert loader.state_dict()["source"]["state"]["sampler"] == {"yielded": 4}
    for _ in range(49):
        next(iterator)
    for ahead in range(3):
        state = loader.state_dict(ahead=ahead)
        assert state["source"]["state"]["sampler"] == {"yielded": 4 * (50 - ahead)}
    for workers in (0, 1):
        resumed = DataLoader(data, 4, sampler=Long(Asked(), make=lambda at: complex(0, at)), num_workers=workers)
        resumed.load_state_dict(state)
        if workers:
            with pytest.raises(ValueError, match=r"holds no count of the keys that have come.*pass num_workers=0"):
                iter(resumed)
        else:
            assert list(next(iter(resumed))) == [192, 193, 194, 195]


@pytest.mark.parametrize("drawn", ["junk", [[]], [[{"a": 1}]], {}, 3])
def test_what_is_refused(drawn: Any) -> None:
    loader = DataLoader(Made(20, draw), 4, sampler=KeepsPlace())
    iterator = iter(loader)
    next(iterator)
    state = through_json(loader.state_dict())
    state["source"]["drawn"] = drawn
    with pytest.raises(ValueError, match="state:"):
        DataLoader(Made(20, draw), 4, sampler=KeepsPlace()).load_state_dict(state)
