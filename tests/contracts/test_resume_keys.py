"""What a state says of a sampler's keys: states of its own that are taken up twice, stored orders, odd keys."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader
from tests.contracts.datasets import Made, draw
from tests.contracts.resuming import DATA, after, generator, through_json, values
from tests.contracts.samplers import KeepsPlace, Unknown
from tests.support.calls import calls_of


def test_a_state_from_the_middle_of_a_batch_is_taken_up_twice() -> None:
    """What was drawn to get there counts as not drawn: the sampler's state is the one before it."""
    loader = DataLoader(DATA, 4, sampler=KeepsPlace(), num_workers=1, in_order=False)
    state = after(loader, 1)
    assert state["progress"]["batches"] == 1
    state["progress"] = {"batches": 1, "below": 2, "above": base64.b64encode(b"\x0c").decode()}  # 0, 1, 4 and 5
    state["source"].update(place=0, position=0, state={"sampler": {"yielded": 0}, "iterator": None}, planes=[])
    rest = []
    for _ in range(3):
        loader = DataLoader(DATA, 4, sampler=KeepsPlace(), num_workers=1, in_order=False)
        loader.load_state_dict(state)
        iterator = iter(loader)
        state = through_json(loader.state_dict())
        rest = [index for batch in iterator for index in batch.tolist()]
    order = list(KeepsPlace())
    assert sorted(rest) == sorted([*order[2:4], *order[6:]])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_with_a_state_at_its_end_is_saved_again(workers: int) -> None:
    def make() -> Any:
        return DataLoader(DATA, 4, sampler=KeepsPlace(), num_workers=workers)

    state = after(make(), 6)
    for _ in range(3):
        loader = make()
        loader.load_state_dict(state)
        state = after(loader, 0)
    resumed = make()
    resumed.load_state_dict(state)
    last, following = values(resumed), values(resumed)
    assert last == [] and following == values(make())


def test_a_stored_order_at_every_step_and_ahead() -> None:
    """Every save of one run, also as it was some batches ago: what is left, and how often each key has come."""
    order = [*range(20), 3, 7, 3, 3]

    class Repeating(Unknown):
        def __iter__(self) -> Iterator[int]:
            return iter(order)

        def __len__(self) -> int:
            return len(order)

    loader: Any = DataLoader(Made(20, draw), 4, sampler=Repeating(), num_workers=1)
    counts = [order[:at].count(key) for at, key in enumerate(order)]
    iterator = iter(loader)
    for step in range(1, 7):
        next(iterator)
        for ahead in range(min(step, 3)):
            source = loader.state_dict(ahead=ahead)["source"]
            at = 4 * (step - ahead)
            assert (source["place"], source["position"]) == (step - ahead, at)
            assert [key for batch in source["drawn"] for key in batch] == order[at:]
            assert source["occurrences"] == counts[at:]


def test_what_a_save_of_a_stored_order_costs() -> None:
    """All but the first, which draws the order and makes it plain, do nothing with each key of it: counted in calls, as
    a time beside another depends on who else wants the processor's caches."""
    many: Any = list(range(50_000))

    class Large(Unknown):
        def __iter__(self) -> Iterator[int]:
            return iter(many)

    loader: Any = DataLoader(many, 64, sampler=Large())
    first, *others = [calls_of(loader.state_dict) for _, _batch in zip(range(5), loader, strict=False)]
    assert others and max(others) < len(many) / 20 < len(many) < first


class Indices(KeepsPlace):
    """NumPy's integers, with repeats, and a state."""

    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            yield np.int64(index)


class IndicesWithoutState(Unknown):
    def __iter__(self) -> Iterator[Any]:
        return iter([np.int64(index) for index in super().__iter__()])


class Pairs(Unknown):
    """Keys of several parts, some of which are the same object."""

    def __iter__(self) -> Iterator[Any]:
        word = "left"
        return iter([(word, word, np.int64(at % 7), np.float32(0.1), (np.str_("x"), True)) for at in range(23)])


@pytest.mark.parametrize("sampler", [Indices, IndicesWithoutState, Pairs])
def test_keys_of_other_classes_draw_the_same_after_a_resume(sampler: Any) -> None:
    def make() -> Any:
        return DataLoader(
            Made(20, draw), 4, sampler=sampler(), num_workers=1, generator=generator(), collate_fn=lambda batch: batch
        )

    def content(batches: Any) -> list[Any]:
        return [sample[1:] for batch in batches for sample in batch]

    reference = content(make())
    loader = make()
    state = after(loader, 4)
    resumed = make()
    resumed.load_state_dict(state)
    assert content(resumed) == reference[16:]


class OwnKeys(KeepsPlace):
    """Keys of any kind, and a state."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, super().__iter__())


class OwnKeysWithoutState(Unknown):
    """The same, stored."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, super().__iter__())


_OWN_KEYS: dict[str, Callable[[int], Any]] = {
    "int32": np.int32,
    "int64": np.int64,
    "float32": np.float32,
    "of two kinds": lambda index: np.int16(index) if index % 2 else index,
    "pairs": lambda index: (np.int32(index), np.float32(0.5)),
}


@pytest.mark.parametrize("sampler", [OwnKeys, OwnKeysWithoutState])
@pytest.mark.parametrize("kind", _OWN_KEYS)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_is_given_numpys_numbers_as_such_after_a_resume(sampler: Any, kind: str, workers: int) -> None:
    """A loader that returns them has batches of the same dtype. They are stored again and again."""

    def make() -> Any:
        data = Made(23, lambda key: (repr(key), key))
        return DataLoader(data, 4, sampler=sampler(_OWN_KEYS[kind]), num_workers=workers, collate_fn=list)

    reference = list(make())
    state = after(make(), 1)
    for batches in (1, 1, 2):
        resumed = make()
        resumed.load_state_dict(state)
        assert list(resumed) == reference[state["progress"]["batches"] :]
        resumed = make()
        resumed.load_state_dict(state)
        state = after(resumed, batches)


class Away(Unknown):
    """Its index server is away when it is asked for the ninth key, and answers again after that."""

    def __iter__(self) -> Iterator[int]:
        return map(_answered, [*range(8), None, *range(8, 20)])


def _answered(key: int | None) -> int:
    if key is None:
        raise OSError("the index server is away")
    return key


def test_a_sampler_that_raised_in_a_save_is_asked_again_by_the_next() -> None:
    data: Any = list(range(20))
    loader: Any = DataLoader(data, None, sampler=Away())
    iterator = iter(loader)
    assert next(iterator) == 0
    with pytest.raises(OSError, match="the index server is away"):
        loader.state_dict()
    resumed: Any = DataLoader(data, None, sampler=Away())
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert list(resumed) == list(iterator) == list(range(1, 20))
