"""Bad samples in a distributed job: every rank has the batches that its positions fix, and none of them is empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import minato_gpu.epoch.delivery
from tests.contracts.datasets import Made, draw, rows
from tests.contracts.modes import BOUNDED_8, IN_ORDER, MINATO, Mode
from tests.contracts.resuming import through_json

_SAMPLES, _BATCH, _RANKS = 120, 4, 2
_BATCHES = 15
_EMPTY = (0, 4, 5, 14)  # of rank 0's batches in order: all of their samples fail; and half of those of batch 9
_BAD = frozenset(_RANKS * position for batch in (*_EMPTY, 9) for position in range(4 * batch, 4 * batch + 4)) - {72, 78}


def _sample(index: int) -> Any:
    if index in _BAD:
        raise ValueError(f"sample {index} is broken")
    return draw(index)


def _loader(mode: Mode, workers: int, rank: int = 0, make: Callable[[int], Any] = _sample, **more: Any) -> Any:
    data = Made(_SAMPLES, make)
    sampler: DistributedSampler[int] = DistributedSampler(data, _RANKS, rank, shuffle=False)
    arguments: dict[str, Any] = {"num_workers": workers, "sampler": sampler, "on_error": "skip", **more}
    arguments.setdefault("batch_size", _BATCH)
    return mode.loader(data, generator=torch.Generator().manual_seed(3), **arguments)


def _check(batches: list[Any], stats: Any, *, in_order: bool) -> None:
    """Of rank 0: every good sample once, and each repetition counted."""
    seen = Counter(sample[0] for batch in batches for sample in batch)
    assert set(seen) == set(range(0, _SAMPLES, _RANKS)) - _BAD
    padded = seen.total() - len(seen)
    assert not in_order or padded == len(_EMPTY)
    assert (stats["samples_delivered"], stats["samples_padded"]) == (len(seen), padded)
    assert (stats["samples_failed"], stats["batches_delivered"]) == (len(_BAD), _BATCHES)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_every_rank_has_its_batches(mode: Mode, workers: int) -> None:
    """In order the last sample before is repeated; at the start, where there is none before, one of the first batch to
    come; with the content that it has there. (Without worker processes nobody seeds what a data set draws from the
    global generators: there only the keys are the same.)"""
    in_order = not (mode.lateness and workers)
    for rank in range(_RANKS):
        loader = _loader(mode, workers, rank)
        for _ in range(2):
            batches = [rows([batch]) for batch in loader]
            assert len(batches) == len(loader) == _BATCHES and all(batches)
            if rank:
                assert loader.stats()["samples_padded"] == 0
                continue
            _check(batches, loader.stats(), in_order=in_order)
            if in_order:
                assert [len(batch) for batch in batches] == [1, 4, 4, 4, 1, 1, 4, 4, 4, 2, 4, 4, 4, 4, 1]
                for at, of in {0: 1, 4: 3, 5: 3, 14: 13}.items():
                    assert batches[at][0][0] == batches[of][3][0]
                    assert batches[at][0] == batches[of][3] or not (workers and mode.processes)


def test_a_process_group_makes_a_job_distributed(tmp_path: Path) -> None:
    """Whatever the sampler: it may be one that shares the data out in a way of its own."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        loader = _loader(IN_ORDER, 2, sampler=range(0, _SAMPLES, _RANKS))
        _check([rows([batch]) for batch in loader], loader.stats(), in_order=True)
    finally:
        torch.distributed.destroy_process_group()


def _gone(index: int) -> Any:
    raise OSError(f"disk {index} is gone")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_nothing_left_to_repeat(mode: Mode, workers: int) -> None:
    with pytest.raises(RuntimeError, match=r"no good one to put in its place.*resume from an earlier state"):
        list(_loader(mode, workers, make=_gone))


@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_every_step_resumes(mode: Mode) -> None:
    """But which sample takes the place of a lost batch: the one before may have been delivered by the run before."""
    reference = [rows([batch]) for batch in _loader(mode, 2)]
    steps = (1, 10)  # before and after batches that lose samples
    loader = _loader(mode, 2)
    iterator, got = iter(loader), list[Any]()
    for step in steps:
        got += [rows([next(iterator)]) for _ in range(step - len(got))]
        first = list(got)
        state = through_json(loader.state_dict())
        behind = through_json(loader.state_dict(ahead=min(step, 2)))
        resumed = _loader(mode, 2)
        resumed.load_state_dict(state)
        whole = [*first, *(rows([batch]) for batch in resumed)]
        assert len(whole) == _BATCHES and all(whole)
        if not mode.lateness:
            assert _without_padding(whole) == _without_padding(reference)
            resumed.load_state_dict(behind)
            again = [rows([batch]) for batch in resumed]
            assert _without_padding([*first[: max(0, step - 2)], *again]) == _without_padding(reference)
        seen = {sample[0] for batch in whole for sample in batch}
        assert seen == set(range(0, _SAMPLES, _RANKS)) - _BAD


def _without_padding(batches: list[Any]) -> list[Any]:
    assert all(len(batches[at]) == 1 for at in _EMPTY)
    return [batch for at, batch in enumerate(batches) if at not in _EMPTY]


def test_draws_are_those_of_the_keys_occurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minato_gpu.epoch.delivery, "pads_batches", lambda loader, options: True)
    loader = _loader(IN_ORDER, 2, sampler=[1, 5, 1, 1, *sorted(_BAD)[:4]])
    batches = [rows([batch]) for batch in loader]
    assert batches[1] == [batches[0][3]]
    assert batches[0][2] != batches[0][3]
