"""Save and resume of iterable data sets without a state that draw from global generators, as others do: they are read
again, and must yield what they had yielded (P1)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader
from tests.contracts.resume_global_program import seed
from tests.contracts.resuming import through_json
from tests.support.raising import error_of

_DRAWS: dict[str, Callable[[int], int]] = {
    "python": random.randrange,
    "torch": lambda below: int(torch.randint(below, ())),
}
_ALL = list(range(24))


class Buffered(IterableDataset[Any]):
    """Numbers through a shuffle buffer."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw, self.numbers = draw, _ALL

    def __iter__(self) -> Iterator[int]:
        held: list[int] = []
        for number in self.numbers:
            held.append(number)
            if len(held) == 6:
                yield held.pop(self.draw(6))
        while held:
            yield held.pop(self.draw(len(held)))


class Shuffled(Buffered):
    """Numbers in an order that is drawn with the first of them."""

    def __iter__(self) -> Iterator[int]:
        order = _ALL.copy()
        while order:
            at = [self.draw(len(order)) for _ in order] if len(order) == len(_ALL) else [0]
            yield order.pop(at[0])


def _mixed(samples: Any) -> Any:
    """Draws from all of them, as mixup does."""
    random.random()
    torch.rand(())
    return samples


def _drawing_once(samples: Any) -> Any:
    if samples == _ALL[:4]:
        return _mixed(samples)
    return _mixed(_mixed(samples))


def _trained(batches: Any, count: int | None, trains: Callable[[], object]) -> list[Any]:
    """So many batches, with a step after each."""
    got: list[Any] = []
    for batch in batches:
        got.append(batch)
        trains()
        if len(got) == count:
            break
    return got


def _resumed(make: Callable[[], Any], trains: Callable[[], object], batches: int, ahead: int = 0) -> tuple[Any, Any]:
    """What a run had, in an epoch and in what was left of it after so many batches; what it has after a resume."""
    seed(5)
    loader = make()
    iterator = iter(loader)
    first = _trained(iterator, batches, trains)
    state = through_json(loader.state_dict(ahead=ahead))
    kept = len(first) - ahead
    reference = [*first, *_trained(iterator, None, trains)]
    seed(99)
    resumed = make()
    resumed.load_state_dict(state)
    return (reference, reference[kept:]), _trained(resumed, None, trains)


def _once(batches: list[Any]) -> bool:
    return sorted(number for batch in batches for number in batch) == _ALL


@pytest.mark.parametrize("draw", _DRAWS)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", [list, _mixed, _drawing_once], ids=["plain", "mixed", "differs"])
def test_a_collate_fn_that_draws(collate: Any, workers: int, draw: str) -> None:
    """Whatever it drew between the samples, it draws again."""

    def make() -> Any:
        return DataLoader(Buffered(_DRAWS[draw]), 4, num_workers=workers, collate_fn=collate)

    for batches in (1, 3, 5):
        (_, rest), again = _resumed(make, lambda: None, batches)
        assert again == rest


@pytest.mark.parametrize("draw", _DRAWS)
def test_training_that_draws_is_told_of(draw: str) -> None:
    """Between the batches, from where the stream draws: it would yield other samples when it is read again."""

    def make() -> Any:
        return DataLoader(Buffered(_DRAWS[draw]), 4, collate_fn=list)

    (_, rest), again = _resumed(make, lambda: _DRAWS[draw](7), 1)
    assert again == rest, "before the second batch nobody has drawn in between"
    for batches in (2, 4):
        with pytest.raises(ValueError, match=r"draws from (torch|Python)'s global generator"):
            _resumed(make, lambda: _DRAWS[draw](7), batches)


def test_a_state_that_is_refused_leaves_generators_as_they_were() -> None:
    """Those that the user had seeded since it was loaded: the stream was read again from where they stood before."""
    loader = DataLoader(Buffered(_DRAWS["python"]), 4, collate_fn=list)
    _trained(iter(loader), 6, lambda: None)
    state = through_json(loader.state_dict())
    dataset = Buffered(_DRAWS["python"])
    resumed = DataLoader(dataset, 4, collate_fn=list)
    resumed.load_state_dict(state)
    dataset.numbers = _ALL[:9]
    random.seed(7)
    before = random.getstate()
    assert "it yields only 9 samples" in str(error_of(ValueError, iter, resumed))
    assert random.getstate() == before


def test_a_collate_fn_may_fail_with_what_is_dropped() -> None:
    """Only what it draws matters then."""
    fails = False

    def collate(samples: Any) -> Any:
        random.random()
        if fails:
            raise OSError("a file is gone")
        return samples

    def make() -> Any:
        return DataLoader(Buffered(_DRAWS["python"]), 4, collate_fn=collate)

    loader = make()
    first = _trained(iter(loader), 3, lambda: None)
    resumed = make()
    resumed.load_state_dict(through_json(loader.state_dict()))
    fails = True
    iterator = iter(resumed)
    fails = False
    assert _once([*first, *iterator])


@pytest.mark.parametrize(
    ("worker_kind", "persistent", "epochs"),
    [("process", False, 2), ("process", True, 1), ("process", True, 2), ("thread", False, 1)],
)
def test_workers_that_drew_before_are_told_of(
    worker_kind: str, persistent: bool, epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        arguments: Any = {"worker_kind": worker_kind, "persistent_workers": persistent}
        return DataLoader(Buffered(_DRAWS["torch"]), 4, num_workers=1, collate_fn=list, **arguments)

    loader = make()
    for _ in range(epochs - 1):
        list(loader)
    _trained(iter(loader), 2, lambda: None)
    resumed = make()
    resumed.load_state_dict(through_json(loader.state_dict()))
    next(iter(resumed))
    told = worker_kind == "thread" or (persistent and epochs > 1)
    assert ("some are lost now and others come twice" in caplog.text) == told


_MAY: dict[str, Callable[[], Any]] = {
    "it draws with its first sample": lambda: DataLoader(Shuffled(_DRAWS["torch"]), 4, collate_fn=list),
    "only the collate_fn draws": lambda: DataLoader(Shuffled(lambda below: below - 1), 4, collate_fn=_mixed),
    "from another generator": lambda: DataLoader(Buffered(_DRAWS["python"]), 4, collate_fn=list),
    "one of its own": lambda: DataLoader(Buffered(random.Random(3).randrange), 4, collate_fn=list),
    "with a worker": lambda: DataLoader(Buffered(_DRAWS["torch"]), 4, collate_fn=list, num_workers=1),
}


@pytest.mark.parametrize("case", _MAY)
def test_training_may_draw(case: str) -> None:
    (_, rest), again = _resumed(_MAY[case], lambda: torch.rand(()), 3)
    assert again == rest


@pytest.mark.parametrize("draw", _DRAWS)
def test_what_the_user_seeds_before_the_epoch_goes_on(draw: str) -> None:
    """That stays as it is, and the stream is read again as it was all the same."""

    def make() -> Any:
        return DataLoader(Buffered(_DRAWS[draw]), 4, collate_fn=list)

    seed(5)
    loader = make()
    first = _trained(iter(loader), 3, lambda: None)
    resumed = make()
    resumed.load_state_dict(through_json(loader.state_dict()))
    seed(77)
    assert _once([*first, *resumed])


@pytest.mark.parametrize("draw", _DRAWS)
def test_a_consumer_that_reads_ahead(draw: str) -> None:
    """A state of batches ago holds torch's generator alone; all are rewound while the stream is read again."""

    def make() -> Any:
        return DataLoader(Buffered(_DRAWS[draw]), 4, collate_fn=list)

    (reference, rest), again = _resumed(make, lambda: None, 4, ahead=2)
    assert _once([*reference[:2], *again])
    assert again == rest or draw == "python"
