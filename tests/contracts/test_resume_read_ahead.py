"""Save and resume while samples' bytes are read ahead: their keys were drawn long before the window comes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minato_gpu import Source, read_bytes
from minato_gpu.engine import building
from minato_gpu.sampling.sources import OFTEN
from tests.contracts.datasets import rows
from tests.contracts.modes import BOUNDED_8, BOUNDED_8_THREADS, IN_ORDER, IN_ORDER_THREADS, Mode
from tests.contracts.resuming import generator, through_json
from tests.contracts.samplers import Counting, KeyByKey, Refilling, Unstated

pytestmark = pytest.mark.usefixtures("no_leaks")

SAMPLES, BATCH, BATCHES = 96, 4, 24


class Declared:
    """Sample ``key`` is the key, its byte of a file and a drawn number."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def source(self, key: int) -> Source:
        return Source(str(self.path), key, 1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: int) -> list[Any]:
        return [key, int(read_bytes(self.source(key))[0]), float(torch.rand((), dtype=torch.float64))]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("declared") / "bytes"
    path.write_bytes(bytes(range(100, 100 + SAMPLES)))
    return path


@pytest.fixture(params=[40, 1024], ids=["part", "whole"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many samples are drawn beyond the window: some of the epoch, or all of it."""
    monkeypatch.setattr(building, "READ_AHEAD", request.param)
    count: int = request.param
    return count


class Dies(Counting):
    """A sampler that cannot go on after three quarters of its keys, for as long as ``away`` says so."""

    away = True

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            yield key
            if self.away and self.at == 72:
                raise OSError("the index server is away")


class DiesUntold(Dies):
    """The same, and nothing is known of it."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


_ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "own state": lambda: {"sampler": Counting(SAMPLES)},
    "own state, from a generator": lambda: {"sampler": KeyByKey(SAMPLES)},
    "own state, of the next epoch": lambda: {"sampler": Refilling(SAMPLES)},
    "no state": lambda: {"sampler": Unstated(SAMPLES)},
}


def _told(batches: Any, mode: Mode) -> list[Any]:
    """What is to be the same: threads draw from one generator, and late batches are composed as samples come."""
    got = [row[:2] if not mode.processes else row for row in rows(batches)]
    return sorted(got) if mode.lateness else got


@pytest.mark.each_value
@pytest.mark.parametrize("name", _ORDERS)
@pytest.mark.parametrize("mode", [IN_ORDER, IN_ORDER_THREADS, BOUNDED_8, BOUNDED_8_THREADS], ids=lambda mode: mode.name)
@pytest.mark.parametrize("saves", [(0, 1, 2, 3, 17, 18, 19), (13,), (23,)], ids=["often", "once", "late"])
def test_everything_comes_once(path: Path, ahead: int, name: str, mode: Mode, saves: tuple[int, ...]) -> None:
    """From every state, also one of some batches before, the rest of the epoch comes, and from the first and the third
    the next one whole."""

    def make(state: Any = None) -> Any:
        loader = mode.loader(Declared(path), BATCH, num_workers=2, generator=generator(), **_ORDERS[name]())
        if state is not None:
            loader.load_state_dict(state)
        return loader

    whole = make()
    epochs = [_told(whole, mode), _told(whole, mode)]
    loader = make()
    iterator, got, states = iter(loader), list[Any](), list[tuple[int, Any]]()
    for step in range(BATCHES):
        if step in saves:
            states.append((step, through_json(loader.state_dict())))
        got.append(next(iterator))
        if step in saves:
            states.append((step, through_json(loader.state_dict(ahead=1))))
    assert _told(got, mode) == epochs[0]
    for number, (step, state) in enumerate(states[-4:]):
        resumed = make(state)
        assert _told([*got[:step], *resumed], mode) == epochs[0], step
        reads = resumed.stats()["reads"]
        assert reads["reads"] + reads["shared"] == SAMPLES - BATCH * step, "all that is left is read ahead, and no more"
        if name != "no state" and number % 2 == 0:  # or nobody could tell of which epoch that is
            assert _told(resumed, mode) == epochs[1], step


@pytest.mark.parametrize(
    "more", [{"epochs": 3}, {"epochs": 3, "persistent_workers": True}], ids=["epochs", "persistent"]
)
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_the_next_epoch_is_read_ahead_already(path: Path, mode: Mode, more: dict[str, Any]) -> None:
    """A state tells nothing of it: it is drawn anew, and comes out the same."""

    def make() -> Any:
        return mode.loader(Declared(path), BATCH, shuffle=True, num_workers=2, generator=generator(), **more)

    loader = make()
    iterator = iter(loader)
    got = [next(iterator) for _ in range(3)]
    assert loader._session.ahead is not None and loader._session.ahead[0].place > 0, "it has been drawn"
    state = through_json(loader.state_dict())
    resumed = make()
    resumed.load_state_dict(state)
    rest, *others = [list(resumed) for _ in range(3)]
    assert _told([*got, *rest], mode) == _told([*got, *iterator], mode)
    assert [_told(epoch, mode) for epoch in others] == [_told(loader, mode) for _ in others]
    for each in (loader, resumed):
        each._session.engine.close()


@pytest.mark.parametrize("batches", [2, 12, 17])
@pytest.mark.parametrize("sampler", [Dies, DiesUntold])
def test_no_state_takes_a_sampler_that_raised_for_one_that_ended(
    path: Path, ahead: int, sampler: Any, batches: int
) -> None:
    """Its error waits until the consumer comes to it. Until then a state leads to all that is left, or is refused."""

    def make() -> Any:
        return IN_ORDER.loader(Declared(path), BATCH, sampler=sampler(SAMPLES), num_workers=1)

    loader = make()
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    if sampler is DiesUntold or batches > OFTEN:  # a state that was kept leads back to where it raised
        for _ in range(2):
            with pytest.raises((ValueError, OSError), match=r"cannot be saved|the index server is away"):
                loader.state_dict()
    else:
        resumed = make()
        resumed.load_state_dict(through_json(loader.state_dict()))
        resumed.sampler.away = False
        assert sum(1 for _ in resumed) == BATCHES - batches
    with pytest.raises(OSError, match="the index server is away"):
        list(iterator)
