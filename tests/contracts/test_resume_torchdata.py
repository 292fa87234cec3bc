"""Samplers with a state that they apply late, or that leave generators to others: no save point loses or repeats a key.

torchdata's own ``StatefulDistributedSampler`` applies what it loaded when it is asked for its first key, and tells an
old state until then, also after an epoch's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.contracts.datasets import Made
from tests.contracts.modes import IN_ORDER, IN_ORDER_THREADS, Mode
from tests.contracts.resuming import generator, through_json

torchdata: Any = pytest.importorskip("torchdata.stateful_dataloader.sampler")

_SAMPLES = 15
_DATA: Any = list(range(_SAMPLES))


class Drawn:
    """A sampler that draws its order from a public generator and keeps it in its state; ``lazily``: it goes on from a
    state when it is asked for its first key, and does not begin anew by itself at its end."""

    def __init__(self, *, lazily: bool) -> None:
        self.generator = generator(3)
        self.lazily = lazily
        self.at = 0
        self.order: list[int] | None = None
        self.loaded: dict[str, Any] | None = None

    def __len__(self) -> int:
        return _SAMPLES

    def __iter__(self) -> Iterator[int]:
        if self.lazily:
            loaded, self.loaded = self.loaded or {"at": 0, "order": None}, None
            self.at, self.order = loaded["at"], loaded["order"]
        if self.order is None:
            self.order = torch.randperm(_SAMPLES, generator=self.generator).tolist()
        while self.at < _SAMPLES:
            self.at += 1
            yield self.order[self.at - 1]
        if not self.lazily:
            self.at, self.order = 0, None

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.lazily:
            self.loaded = state
        else:
            self.at, self.order = state["at"], state["order"]


class Redrawn:
    """One whose state is a number: its order is drawn from the public generator once more, or from one in its state."""

    def __init__(self, *, keeps: bool) -> None:
        self.generator = generator(4)
        self.keeps = keeps
        self.begun_from = self.generator.get_state()
        self.at = 0
        self.skip = 0

    def __len__(self) -> int:
        return _SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.begun_from = self.generator.get_state()
        self.at, self.skip = self.skip, 0
        for index in torch.randperm(_SAMPLES, generator=self.generator).tolist()[self.at :]:
            self.at += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.begun_from.tolist() if self.keeps else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip = state["at"]
        if state["generator"] is not None:
            self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


def _distributed(shuffle: bool) -> Any:
    return torchdata.StatefulDistributedSampler(_DATA, num_replicas=1, rank=0, shuffle=shuffle)


def _random(**more: Any) -> Any:
    return torchdata.RandomSampler(_DATA, generator=generator(2), **more)


_SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "distributed": lambda: {"batch_size": 4, "sampler": _distributed(False)},
    "distributed, shuffled": lambda: {"batch_size": 4, "sampler": _distributed(True)},
    "distributed, drop_last": lambda: {"batch_size": 4, "sampler": _distributed(True), "drop_last": True},
    "distributed, single keys": lambda: {"batch_size": None, "sampler": _distributed(True)},
    "batches of distributed": lambda: {"batch_sampler": torchdata.BatchSampler(_distributed(True), 4, False)},
    "random": lambda: {"batch_size": 4, "sampler": _random()},
    "random, longer": lambda: {"batch_size": 4, "sampler": _random(num_samples=21)},
    "random, replacement": lambda: {"batch_size": 4, "sampler": _random(replacement=True, num_samples=26)},
    "batches of random": lambda: {"batch_sampler": torchdata.BatchSampler(_random(), 4, False)},
    "drawn": lambda: {"batch_size": 4, "sampler": Drawn(lazily=False)},
    "drawn, lazily": lambda: {"batch_size": 4, "sampler": Drawn(lazily=True)},
    "redrawn": lambda: {"batch_size": 4, "sampler": Redrawn(keeps=False)},
    "redrawn, with its generator": lambda: {"batch_size": 4, "sampler": Redrawn(keeps=True)},
}
_WAYS = {"inline": (IN_ORDER, 0), "processes": (IN_ORDER, 1), "threads": (IN_ORDER_THREADS, 2)}


def _state(loader: Any, ahead: int = 0) -> Any:
    """As another process would read it; torchdata keeps a tensor in some."""
    state = loader.state_dict(ahead=ahead)
    tensors = "generator" in str(state["source"].get("state"))
    return state if tensors else through_json(state)


def _flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch.reshape(-1).tolist()]


@pytest.mark.each_value
@pytest.mark.parametrize("way", ["inline", "threads"])
@pytest.mark.parametrize("name", _SAMPLERS)
def test_every_save_point(name: str, way: str) -> None:
    """See ``_every_save_point``."""
    _every_save_point(*_WAYS[way], name)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name",
    [  # of what every sampler does by threads one is enough in the gate
        *(pytest.param(name, marks=pytest.mark.on_request) for name in ("distributed, shuffled", "batches of random")),
        "drawn, lazily",
    ],
)
def test_every_save_point_by_processes(name: str) -> None:
    """See ``_every_save_point``."""
    _every_save_point(*_WAYS["processes"], name)


def _every_save_point(mode: Mode, workers: int, name: str) -> None:
    """After every step of two epochs, and between: what is left of the epoch comes, and two epochs after it.

    Each state is taken up twice: from the state as it was saved, and from one that is saved again at once; and as it
    was a batch before.
    """
    torch.manual_seed(1)

    def make(state: Any = None) -> Any:
        more = {"persistent_workers": workers > 0, **_SAMPLERS[name]()}
        loader = mode.loader(Made(_SAMPLES, torch.tensor), num_workers=workers, **more)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    whole = make()
    epochs = [_flat(whole) for _ in range(4)]

    def check(state: Any, epoch: int, used: list[int]) -> None:
        resumed = make(state)
        iterator = iter(resumed)
        again = make(_state(resumed))
        for loader, rest in ((resumed, iterator), (again, iter(again))):
            assert used + _flat(rest) == epochs[epoch], "the rest of the epoch"
            assert [_flat(loader) for _ in range(3 - epoch)] == epochs[epoch + 1 :], "the epochs after it"

    loader = make()
    for epoch in range(2):
        check(_state(loader), epoch, [])
        iterator, got = iter(loader), list[Any]()
        steps = len(loader) + 1
        for step in range(steps):
            state = _state(loader)  # taken at every step, used at some where they take long
            if (not workers and step % (1 + epoch) == 0) or step in (0, 2, steps - 1 - epoch):
                check(state, epoch, _flat(got))
                ahead = 1 + step % 2
                if ahead <= len(got):
                    check(_state(loader, ahead), epoch, _flat(got[:-ahead]))
            got += [batch for _, batch in zip(range(1), iterator, strict=False)]
        assert _flat([*got, *iterator]) == epochs[epoch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["distributed", "drawn", "drawn, lazily", "random", "batches of distributed"])
def test_saved_seldom(name: str, workers: int) -> None:
    """Once in an epoch: from then on, whatever is resumed is given up again after a batch, as it begins or later."""

    def make(state: Any = None) -> Any:
        loader = IN_ORDER_THREADS.loader(Made(_SAMPLES, torch.tensor), num_workers=workers, **_SAMPLERS[name]())
        if state is not None:
            loader.load_state_dict(state)
        return loader

    whole = make()
    epochs = [_flat(whole) for _ in range(3)]
    found: list[list[int]] = [[] for _ in epochs]
    state: Any = None
    for turn in range(40):
        loader = make(state)
        epoch = 0 if state is None else state["epoch"]
        if epoch == 3:
            break
        iterator = iter(loader)
        found[epoch] += _flat(batch for _, batch in zip(range(turn % 3), iterator, strict=False))
        state = _state(loader)
    assert found == epochs


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_was_left(workers: int) -> None:
    """The sampler still tells how far that had come when the next one begins."""

    def make() -> Any:
        return IN_ORDER.loader(Made(_SAMPLES, torch.tensor), 4, sampler=_distributed(False), num_workers=workers)

    loader = make()
    next(iter(loader))
    iterator = iter(loader)
    state = _state(loader)
    resumed = make()
    resumed.load_state_dict(state)
    assert _flat(resumed) == _flat(resumed) == _flat(iterator) == _DATA


def test_a_sampler_is_asked_for_nothing_before_its_first_key() -> None:
    """Not by a loader with workers, nor by one that has drawn nothing yet: that draws, and delivers it all the same."""

    class Strict(Drawn):
        def state_dict(self) -> dict[str, Any]:
            assert self.at, "asked between iter() and the first key"
            return super().state_dict()

    for workers in (0, 1):
        loader = IN_ORDER.loader(Made(_SAMPLES, torch.tensor), 4, sampler=Strict(lazily=True), num_workers=workers)
        iterator = iter(loader)
        state = _state(loader)
        assert state["source"]["drawn"] and not state["progress"]["batches"]
        resumed = IN_ORDER.loader(Made(_SAMPLES, torch.tensor), 4, sampler=Strict(lazily=True), num_workers=workers)
        resumed.load_state_dict(state)
        assert _flat(resumed) == _flat(iterator) and len(set(_flat(resumed))) == _SAMPLES


def test_an_empty_sampler() -> None:
    class Empty(Drawn):
        def __len__(self) -> int:
            return 0

        def __iter__(self) -> Iterator[int]:
            return iter(())

    for workers in (0, 1):
        loader = IN_ORDER.loader(_DATA, 4, sampler=Empty(lazily=False), num_workers=workers)
        iterator = iter(loader)
        for state in (_state(loader), [list(iterator), _state(loader)][1]):
            resumed = IN_ORDER.loader(_DATA, 4, sampler=Empty(lazily=False), num_workers=workers)
            resumed.load_state_dict(state)
            assert list(resumed) == list(resumed) == []
