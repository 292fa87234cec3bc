"""P1: everything that the sampler yields is delivered as many times as it yields it, in every mode."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from tests.contracts.checks import NOTHING, differences
from tests.contracts.datasets import Costly, Recorded, Streams
from tests.contracts.modes import BOUNDED, EVERY, MINATO, PYTORCH, Mode

_WORKERS = (0, 1, 2, 3)


def _numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


@pytest.mark.parametrize("workers", _WORKERS)
@pytest.mark.parametrize("mode", EVERY, ids=lambda mode: mode.name)
def test_map_style(mode: Mode, workers: int) -> None:
    """Shuffled, 61 samples in batches of 4, two epochs."""
    sampler = Recorded(RandomSampler(range(61)))
    loader = mode.loader(Costly(61), 4, sampler=sampler, num_workers=workers)
    for epoch in range(2):
        batches = list(loader)
        order = sampler.epochs[epoch]
        assert differences(order, _numbers(batches)) == NOTHING
        assert sorted(map(len, batches)) == [1, *[4] * 15]
        if workers == 0 or not mode.lateness:
            assert _numbers(batches) == order


@pytest.mark.parametrize("workers", _WORKERS)
@pytest.mark.parametrize("mode", EVERY, ids=lambda mode: mode.name)
def test_repeated_indices(mode: Mode, workers: int) -> None:
    sampler = Recorded(RandomSampler(range(10), replacement=True, num_samples=53))
    loader = mode.loader(Costly(10), 5, sampler=sampler, num_workers=workers)
    for epoch in range(2):
        received = _numbers(loader)
        assert differences(sampler.epochs[epoch], received) == NOTHING
        if workers == 0 or not mode.lateness:
            assert received == sampler.epochs[epoch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", EVERY, ids=lambda mode: mode.name)
def test_drop_last_drops_the_last_positions_of_the_sampler(mode: Mode, workers: int) -> None:
    """The last positions hold cheap samples and slow ones stand earlier: those must not be dropped in their place."""
    slow_first = sorted(range(30), key=lambda index: index % 7 != 3)
    loader = mode.loader(Costly(30), 4, sampler=slow_first, num_workers=workers, drop_last=True)
    batches = list(loader)
    assert differences(slow_first[:28], _numbers(batches)) == NOTHING
    assert [len(batch) for batch in batches] == [4] * 7


@pytest.mark.parametrize("workers", _WORKERS)
@pytest.mark.parametrize("mode", EVERY, ids=lambda mode: mode.name)
def test_users_batch_sampler_keeps_its_batches(mode: Mode, workers: int) -> None:
    order = list(range(40))
    random.Random(3).shuffle(order)
    planned = [order[start : start + 1 + start % 3] for start in range(0, 38, 3)] + [[5, 5, 6], [5]]
    delivered = [batch.tolist() for batch in mode.loader(Costly(40), batch_sampler=planned, num_workers=workers)]
    assert differences(map(tuple, planned), map(tuple, delivered)) == NOTHING
    if workers == 0 or not mode.lateness:
        assert delivered == planned


@pytest.mark.parametrize("mode", EVERY, ids=lambda mode: mode.name)
def test_pytorchs_batch_sampler(mode: Mode) -> None:
    sampler = BatchSampler(RandomSampler(range(30), generator=torch.Generator().manual_seed(1)), 4, drop_last=False)
    batches = list(mode.loader(Costly(30), batch_sampler=sampler, num_workers=2))
    assert differences(range(30), _numbers(batches)) == NOTHING
    assert sorted(map(len, batches)) == [2, *[4] * 7]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", EVERY, ids=lambda mode: mode.name)
def test_without_batching(mode: Mode, workers: int) -> None:
    received = [int(sample) for sample in mode.loader(Costly(31), None, num_workers=workers)]
    assert differences(range(31), received) == NOTHING
    if not mode.lateness:
        assert received == list(range(31))


@pytest.mark.parametrize("sizes", [[9, 1, 0], [0, 0, 0], [5, 5, 5]], ids=str)
@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("mode", [mode for mode in EVERY if mode.processes], ids=lambda mode: mode.name)
def test_streams(mode: Mode, batch_size: int | None, sizes: list[int]) -> None:
    """Each worker's stream once, each in its own order; a batch never mixes streams."""
    loader = mode.loader(Streams(sizes), batch_size, num_workers=3, persistent_workers=batch_size != 1)
    for _ in range(2):
        batches = [batch.reshape(-1, 2).tolist() for batch in loader]
        received = [tuple(pair) for batch in batches for pair in batch]
        assert all(len({worker for worker, _ in batch}) == 1 for batch in batches)
        for worker, size in enumerate(sizes):
            assert [number for owner, number in received if owner == worker] == list(range(size))
        assert len(received) == sum(sizes)


@pytest.mark.parametrize("mode", [mode for mode in MINATO if not mode.processes], ids=lambda mode: mode.name)
def test_a_stream_in_a_thread(mode: Mode) -> None:
    """One thread at most: ``get_worker_info`` knows one worker to a process, so threads could not share a stream."""
    loader = mode.loader(Streams([9]), 4, num_workers=1)
    for _ in range(2):
        assert [batch[:, 1].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_many_short_epochs(mode: Mode, persistent: bool) -> None:
    sampler = Recorded(RandomSampler(range(7)))
    extra: dict[str, Any] = {"persistent_workers": True} if persistent else {"epochs": 12}
    loader = mode.loader(Costly(7), 3, sampler=sampler, num_workers=2, **extra)
    for _ in range(12):
        assert differences(range(7), _numbers(loader)) == NOTHING


@pytest.mark.parametrize("mode", [PYTORCH, *BOUNDED], ids=lambda mode: mode.name)
def test_after_an_early_break_the_next_epoch_is_whole(mode: Mode) -> None:
    loader = mode.loader(Costly(50), 4, num_workers=2, shuffle=True, persistent_workers=True)
    for _ in range(3):
        for batch in loader:
            assert len(batch) == 4
            break
        assert differences(range(50), _numbers(loader)) == NOTHING


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_the_counters_agree(mode: Mode, workers: int) -> None:
    loader = mode.loader(Costly(30), 4, num_workers=workers)
    batches = list(loader)
    stats = loader.stats()
    assert (stats["samples_expected"], stats["samples_delivered"], stats["batches_delivered"]) == (30, 30, 8)
    assert (stats["samples_failed"], stats["samples_repeated"]) == (0, 0)
    assert sum(lane["samples"] for lane in stats["lanes"].values()) == 30
    assert stats["lateness"]["max"] <= mode.lateness
    assert len(_numbers(batches)) == 30
