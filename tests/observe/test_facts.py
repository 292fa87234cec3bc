"""The stream of facts: who has subscribed hears all, in order, and cannot harm the run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from minato_gpu import DataLoader
from minato_gpu.observe import facts as f


class Listed(DataLoader[Any]):
    """A loader whose facts are kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heard: list[f.Fact] = []
        self._session.facts.subscribe(self.heard.append)

    def of(self, kind: type) -> list[Any]:
        return [fact for fact in self.heard if type(fact) is kind]


class Fails(list[int]):
    """One of them cannot be read."""

    def __getitem__(self, key: Any) -> Any:
        if key == 5:
            raise ValueError("five")
        return super().__getitem__(key)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("in_order", [True, False])
def test_an_epoch_is_told_from_its_beginning_to_its_end(workers: int, in_order: bool) -> None:
    loader = Listed(list(range(25)), 4, num_workers=workers, in_order=in_order)
    for number in range(2):
        loader.heard.clear()
        assert len(list(loader)) == 7
        (began,), (ended,) = loader.of(f.EpochBegan), loader.of(f.EpochEnded)
        assert (began.epoch, began.samples) == (number, 25)
        assert ended.epoch == number and began.at <= ended.at
        delivered, worked = loader.of(f.BatchDelivered), [fact for fact in loader.of(f.Worked) if fact.prepared]
        assert [fact.number for fact in delivered] == list(range(7)) and len(loader.of(f.BatchAsked)) == 8
        for facts in (delivered, worked):
            assert sorted(n for fact in facts for lo, hi in fact.positions for n in range(lo, hi)) == list(range(25))
        assert sum(fact.samples for fact in worked) == sum(fact.samples for fact in delivered) == 25
        assert all(fact.begin <= fact.end for fact in worked)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_has_its_number_after_a_resume_too(workers: int, stream: bool) -> None:
    data: Any = IterableWrapper(range(25)) if stream else list(range(25))
    first = DataLoader(data, 4, num_workers=workers)
    batches = iter(first)
    next(batches), next(batches)
    loader = Listed(data, 4, num_workers=workers)
    loader.load_state_dict(first.state_dict())
    assert len(list(loader)) == 5
    assert [fact.number for fact in loader.of(f.BatchDelivered)] == [2, 3, 4, 5, 6]
    assert [batch[2] for batch in loader.timeline()["batches"]] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_fails_is_told(workers: int) -> None:
    loader = Listed(Fails(range(8)), 4, num_workers=workers)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="five"):
        next(batches)
    assert [(fact.samples, fact.skipped) for fact in loader.of(f.Failed)] == [(1, 3)]
    loader = Listed(Fails(range(8)), 4, num_workers=workers, on_error="skip")
    assert [len(batch) for batch in loader] == [4, 3]
    assert sum(fact.samples for fact in loader.of(f.Failed)) == 1
    assert [fact.samples for fact in loader.of(f.BatchDelivered)] == [4, 3]


def test_a_hearer_that_raises_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    loader = Listed(list(range(8)), 4)

    def breaks(fact: f.Fact) -> None:
        raise OSError("no space left")

    loader._session.facts.subscribe(breaks)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        assert len(list(loader)) == 2
    assert len(caplog.records) == 1 and "hears nothing more" in caplog.text and "no space left" in caplog.text
    assert len(loader.of(f.BatchDelivered)) == 2
