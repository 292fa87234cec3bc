"""A data set with a large state: copied with every batch while it is saved, and else only now and then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from minato_gpu import DataLoader
from minato_gpu.lanes.streams import EVERY, LARGE
from minato_gpu.sampling import worker_streams
from tests.contracts.modes import BOUNDED_8, IN_ORDER, IN_ORDER_THREADS, Mode
from tests.contracts.resuming import through_json

_SAMPLES = 150
_WORDS = list(range(LARGE))


class Large(IterableDataset[Any]):
    """Worker ``w``'s stream of pairs (w, n); a batch also tells how often its state was asked for, and samples made."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.at = self.asked = self.made = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        while self.at < _SAMPLES:
            self.at += 1
            self.made += 1
            if self.at - 1 == self.bad:
                raise ValueError("bad")
            yield [0 if info is None else info.id, self.at - 1, self.asked, self.made]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"at": self.at, "words": _WORDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["words"] == _WORDS
        self.at = state["at"]


_MODES = [(IN_ORDER, 0), (IN_ORDER, 2), (BOUNDED_8, 2), (IN_ORDER_THREADS, 1)]


def _loader(mode: Mode, workers: int, bad: int | None = None) -> Any:
    return mode.loader(Large(bad), 3, num_workers=workers, collate_fn=torch.tensor)


def _after(loader: Any, iterator: Any, batches: int, ahead: int = 0) -> tuple[list[Any], Any]:
    got = [next(iterator)[:, :2].tolist() for _ in range(batches)]
    return got, through_json(loader.state_dict(ahead=ahead))


def _whole(found: list[Any], workers: int) -> None:
    """Every worker's stream was delivered once, in its order."""
    samples = [tuple(sample) for batch in found for sample in batch]
    for worker in range(max(1, workers)):
        assert [n for owner, n in samples if owner == worker] == list(range(_SAMPLES))


@pytest.mark.parametrize(("mode", "workers"), _MODES, ids=lambda each: getattr(each, "name", str(each)))
def test_at_any_step(mode: Mode, workers: int) -> None:
    """A first save of an epoch, with what came before and ahead; and one more, right after it was taken up."""
    for step in (0, 16, 17) if mode.processes and workers else (0, 1, 15, 16, 17, 31, 40, 47):
        loader = _loader(mode, workers)
        first, state = _after(loader, iter(loader), step)
        resumed = _loader(mode, workers)
        resumed.load_state_dict(state)
        second, state = _after(resumed, iterator := iter(resumed), 1, ahead=1)
        for got, own in ((first, state), ([*first, *second], through_json(resumed.state_dict()))):
            last = _loader(mode, workers)
            last.load_state_dict(own)
            _whole([*got, *(batch[:, :2].tolist() for batch in last)], workers)
        del iterator


@pytest.mark.each_value
@pytest.mark.parametrize("ahead", [0, 3, 20])
@pytest.mark.parametrize(("mode", "workers"), _MODES, ids=lambda each: getattr(each, "name", str(each)))
def test_saved_now_and_then(mode: Mode, workers: int, ahead: int) -> None:
    """Seldom, and from step 36 on always."""
    loader = _loader(mode, workers)
    iterator, found = iter(loader), list[Any]()
    for _ in range(2):
        found += _after(loader, iterator, 18)[0]
    for step in range(6):
        found += _after(loader, iterator, 1)[0]
        state = through_json(loader.state_dict(ahead=ahead))
        if step % 2:
            resumed = _loader(mode, workers)
            resumed.load_state_dict(state)
            _whole([*found[: len(found) - ahead], *(batch[:, :2].tolist() for batch in resumed)], workers)


@pytest.mark.parametrize(("mode", "workers"), _MODES, ids=lambda each: getattr(each, "name", str(each)))
def test_how_often_it_is_asked(mode: Mode, workers: int) -> None:
    """While nobody saves, for one batch in so many; while somebody does at every step, for each."""
    batches = _SAMPLES // 3 * max(1, workers)
    *_, last = _loader(mode, workers)
    assert last[-1, 2] <= EVERY + 2 + batches // EVERY
    loader = _loader(mode, workers)
    asked = []
    for batch in loader:
        loader.state_dict()
        asked.append(batch[-1, 2].item())
    assert max(asked) >= _SAMPLES // 3 - 2


@pytest.mark.parametrize(("mode", "workers"), [_MODES[1], _MODES[3]], ids=["processes", "threads"])
def test_only_what_came_since_is_read_again(mode: Mode, workers: int) -> None:
    loader = _loader(mode, workers)
    _, state = _after(loader, iter(loader), 44)
    since = [own.get("since", 0) for own in state["source"]["streams"]]
    assert 0 < max(since) < EVERY
    resumed = _loader(mode, workers)
    resumed.load_state_dict(state)
    made = {int(batch[0, 0]): int(batch[0, 3]) for _, batch in zip(range(workers), resumed, strict=False)}
    assert made == {worker: 3 * since[worker] + 1 for worker in range(workers)}


@pytest.mark.parametrize("workers", [0, 1])
def test_after_a_batch_that_failed(workers: int) -> None:
    """Nobody knows how far into it the stream is, so that its state is told."""

    class Goes(Large):
        """Its iterator goes on after an error."""

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            self.at += 1
            if self.at - 1 == self.bad:
                raise ValueError("bad")
            if self.at > _SAMPLES:
                raise StopIteration
            return [0, self.at - 1, 0, 0]

    def make() -> Any:
        return DataLoader(Goes(bad=91), 3, num_workers=workers, collate_fn=torch.tensor)

    loader = make()
    iterator, found = iter(loader), list[int]()
    while len(found) < 108:
        try:
            found += next(iterator)[:, 1].tolist()
        except ValueError:
            continue
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    found += [n for batch in resumed for n in batch[:, 1].tolist()]
    assert found == [*range(90), *range(92, _SAMPLES)]


@pytest.mark.parametrize("since", [-1, 100, "3", True, 1 << 62])
def test_what_is_refused(since: Any) -> None:
    loader = _loader(IN_ORDER, 1)
    _, state = _after(loader, iter(loader), 20)
    state["source"]["streams"][0]["since"] = since
    with pytest.raises(ValueError, match="'since' must be a whole number from 0 to 20"):
        _loader(IN_ORDER, 1).load_state_dict(state)


def test_states_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones: so many batches can be taken back, and who wants more is told."""
    one = len(json.dumps(_WORDS)) // 3  # about as many bytes as a pickled one has
    monkeypatch.setattr(worker_streams, "MOST_BYTES", 8 * one)
    loader = _loader(IN_ORDER, 1)
    iterator, found = iter(loader), list[Any]()
    for _ in range(30):
        found += _after(loader, iterator, 1)[0]
    with pytest.raises(ValueError, match=r"ahead=20: .* and the last \d+ can be taken back") as refused:
        loader.state_dict(ahead=20)
    most = int(str(refused.value).split("the last ")[1].split()[0])
    assert 2 <= most <= 12
    resumed = _loader(IN_ORDER, 1)
    resumed.load_state_dict(loader.state_dict(ahead=most))
    _whole([*found[:-most], *(batch[:, :2].tolist() for batch in resumed)], 1)
