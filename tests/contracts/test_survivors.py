"""Bad samples in a distributed job: every rank has the batches that its positions fix, and none of them is empty."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from minato_gpu import DataLoader, merge_state_dicts
from tests.contracts.datasets import Made, draw, rows
from tests.contracts.modes import BOUNDED_8, IN_ORDER, MINATO, Mode
from tests.contracts.resuming import through_json
from tests.support.device_batches import Fake, fake
from tests.support.numbers import PIPELINE, Numbers

__all__ = ["fake"]

_SAMPLES, _BATCH, _RANKS = 120, 4, 2
_BATCHES = 15
_EMPTY = (0, 4, 5, 14)  # of rank 0's batches in order: all of their samples fail; and half of those of batch 9
_BAD = frozenset(_RANKS * position for batch in (*_EMPTY, 9) for position in range(4 * batch, 4 * batch + 4)) - {72, 78}


def _sample(index: int) -> Any:
    if index in _BAD:
        raise ValueError(f"sample {index} is broken")
    return draw(index)


def _loader(
    mode: Mode, workers: int, rank: int = 0, make: Callable[[int], Any] = _sample, length: int = _SAMPLES, **more: Any
) -> Any:
    data = Made(length, make)
    sampler: DistributedSampler[int] = DistributedSampler(data, _RANKS, rank, shuffle=False)
    arguments: dict[str, Any] = {"num_workers": workers, "sampler": sampler, "on_error": "skip", **more}
    arguments.setdefault("batch_size", _BATCH)
    return mode.loader(data, generator=torch.Generator().manual_seed(3), **arguments)


def _indices(batches: Any) -> list[list[int]]:
    return [[int(sample[0]) for sample in rows([batch])] for batch in batches]


def _check(batches: list[list[int]], stats: Any, repeated: int | None = None) -> None:
    """Every good sample of rank 0 once, and each repetition counted."""
    assert len(batches) == _BATCHES and all(batches)
    seen = Counter(index for batch in batches for index in batch)
    assert set(seen) == set(range(0, _SAMPLES, _RANKS)) - _BAD
    padded = seen.total() - len(seen)
    assert repeated is None or padded == repeated
    assert (stats["samples_delivered"], stats["samples_padded"]) == (len(seen), padded)
    assert (stats["samples_failed"], stats["batches_delivered"]) == (len(_BAD), _BATCHES)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_every_rank_has_its_batches(mode: Mode, workers: int) -> None:
    for rank in range(_RANKS):
        loader = _loader(mode, workers, rank)
        for _ in range(2):
            batches = _indices(loader)
            assert len(batches) == len(loader) == _BATCHES
            if rank == 0:
                _check(batches, loader.stats(), len(_EMPTY) if not (mode.lateness and workers) else None)
            else:
                assert loader.stats()["samples_padded"] == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_in_order_the_last_sample_before_is_repeated(workers: int) -> None:
    """At the start, where there is none before, the first one to come; with the content that it has in its place."""
    batches = [rows([batch]) for batch in _loader(IN_ORDER, workers)]
    assert [len(batch) for batch in batches] == [1, 4, 4, 4, 1, 1, 4, 4, 4, 2, 4, 4, 4, 4, 1]
    assert batches[0][0][0] == batches[1][0][0] == 8
    assert batches[4] == batches[5] == [batches[3][3]]
    assert batches[14] == [batches[13][3]]
    if workers:
        assert batches[0] == [batches[1][0]]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_ranks_empty_batches_are_left_out(workers: int) -> None:
    loader = _loader(IN_ORDER, workers, sampler=range(0, _SAMPLES, _RANKS))
    assert len(_indices(loader)) == _BATCHES - len(_EMPTY)
    assert loader.stats()["samples_padded"] == 0


def test_a_process_group_makes_a_job_distributed(tmp_path: Path) -> None:
    """Whatever the sampler: it may be one that shares the data out in a way of its own."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        loader = _loader(IN_ORDER, 2, sampler=range(0, _SAMPLES, _RANKS))
        _check(_indices(loader), loader.stats(), len(_EMPTY))
    finally:
        torch.distributed.destroy_process_group()


def test_out_of_order_good_samples_are_spread() -> None:
    """A run of bad samples longer than a batch, and a window that reaches beyond it: nothing need be repeated."""
    loader = _loader(BOUNDED_8, 2, prefetch_factor=4)
    batches = _indices(loader)
    _check(batches, loader.stats())
    assert loader.stats()["samples_padded"] <= 1  # the last batch may find that all the others are gone
    assert loader.stats()["lateness"]["max"] <= 8


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_a_start_of_bad_samples_longer_than_the_window(mode: Mode, workers: int) -> None:
    def make(index: int) -> Any:
        if index < 100:
            raise OSError("gone")
        return draw(index)

    loader = _loader(mode, workers, make=make)
    batches = _indices(loader)
    assert len(batches) == _BATCHES
    assert sorted(index for batch in batches[12:] for index in batch) == list(range(100, 120, 2))
    if not mode.lateness:
        assert batches[:12] == [[100]] * 12
    assert loader.stats()["samples_padded"] == 12


@pytest.mark.parametrize("budget", [1, 3000])
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_lost_batches_in_a_row_under_a_small_budget(mode: Mode, budget: int) -> None:
    """Those that are composed and lost are no batches for the consumer: the oldest sample may proceed past them."""

    def make(index: int) -> Any:
        if index < 40:
            raise OSError("gone")
        return draw(index)

    loader = _loader(mode, 2, make=make, host_memory_budget=budget, timeout=20)
    batches = _indices(loader)
    assert len(batches) == _BATCHES and all(batches)
    assert {index for batch in batches for index in batch} == set(range(40, _SAMPLES, _RANKS))
    assert loader.stats()["samples_padded"] == (5 if not mode.lateness else sum(map(len, batches)) - 40)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_nothing_left_to_repeat(mode: Mode, workers: int) -> None:
    def make(index: int) -> Any:
        raise OSError(f"disk {index} is gone")

    with pytest.raises(OSError, match="disk 0 is gone"):
        list(_loader(mode, workers, make=make, length=40))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failure_that_raises_comes_first(workers: int) -> None:
    loader = _loader(IN_ORDER, workers, on_error=lambda bad: "raise" if bad.index == 38 else "skip")
    received: list[Any] = []
    with pytest.raises(ValueError, match="sample 38 is broken"):
        received.extend(loader)
    assert len(received) == 4


_COLLATE: dict[str, dict[str, Any]] = {
    "joined": {"collate_fn": list},
    "no batches": {"batch_size": None},
    "whole epochs": {"persistent_workers": True},
}


@pytest.mark.parametrize("case", _COLLATE)
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_however_batches_are_made(mode: Mode, case: str) -> None:
    loader = _loader(mode, 2, **_COLLATE[case])
    batches = list(loader)
    samples = batches if case == "no batches" else [s for batch in batches for s in (zip(*batch, strict=True))]
    if case == "joined":
        samples = [sample for batch in batches for sample in batch]
    count = Counter(int(sample[0]) for sample in samples)
    assert set(count) == set(range(0, _SAMPLES, _RANKS)) - _BAD
    assert len(batches) == (60 if case == "no batches" else _BATCHES)
    content = {tuple(map(str, sample)) for sample in samples}
    assert not mode.processes or len(content) == len(count), "a repeated sample differs"


@pytest.mark.parametrize("lanes", [["cpu"], ["device"], ["cpu", "device"]], ids="+".join)
def test_on_a_device(fake: Fake, lanes: list[str]) -> None:
    def read(fields: Any, params: Any) -> Any:
        if fields["n"] in range(16, 24):
            raise ValueError("cannot be read")
        return PIPELINE.stages[0].cpu(fields, params)

    from minato_gpu import Pipeline, Stage

    stages = (Stage("read", ("n",), PIPELINE.stages[0].writes, cpu=read), *PIPELINE.stages[1:])
    pipeline = Pipeline(stages, outputs=PIPELINE.outputs, name="tests")
    device = fake()
    data = Numbers()
    sampler: DistributedSampler[int] = DistributedSampler(data, 2, 0, shuffle=False)
    loader = DataLoader(
        data, 4, sampler=sampler, num_workers=2, device="cuda", pipeline=pipeline, lanes=lanes, on_error="skip"
    )
    seen: list[Any] = []
    for batch in loader:
        for name in ("label", "x"):
            device.read(batch[name], lambda tensor: seen.append(tensor.clone()))
    device.finish()
    labels, images = seen[::2], seen[1::2]
    assert len(labels) == len(loader) and labels[2].tolist() == [14]
    assert torch.allclose(images[2][0], images[1][3], atol=1e-6)
    assert loader.stats()["samples_padded"] == 1


def test_a_survivor_that_kills_when_it_is_repeated() -> None:
    """That batch cannot be made; the others can."""
    seen = multiprocessing.get_context("fork").Value("i", 0, lock=False)

    def make(index: int) -> Any:
        if index == 6:
            seen.value += 1
            if seen.value > 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if 8 <= index < 16:
            raise ValueError("broken")
        return draw(index)

    loader = _loader(IN_ORDER, 2, make=make, length=40, on_worker_death="replace")
    iterator, found = iter(loader), list[Any]()
    while True:
        try:
            found += _indices([next(iterator)])
        except StopIteration:
            break
        except RuntimeError as error:
            found.append(type(error).__name__)
    assert found == [[0, 2, 4, 6], "KilledWorkers", [16, 18, 20, 22], [24, 26, 28, 30], [32, 34, 36, 38]]
    assert loader.stats()["workers"]["died"] == 2


# --- save and resume ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_every_step_resumes(mode: Mode) -> None:
    """The repeated samples too: the one before an empty batch may have been delivered by the run before."""
    reference = [rows([batch]) for batch in _loader(mode, 2)]
    steps = (0, 1, 2, 4, 5, 6, 9, 10, 14, 15)  # at the ends, and before and after each batch that loses samples
    loader = _loader(mode, 2)
    iterator, got = iter(loader), list[Any]()
    for step in steps[:: 2 if mode.lateness else 1]:
        got += [rows([next(iterator)]) for _ in range(step - len(got))]
        first = list(got)
        state = through_json(loader.state_dict())
        behind = through_json(loader.state_dict(ahead=min(step, 2)))
        resumed = _loader(mode, 2)
        resumed.load_state_dict(state)
        whole = [*first, *(rows([batch]) for batch in resumed)]
        assert len(whole) == _BATCHES and all(whole)
        if not mode.lateness:
            assert whole == reference
            resumed.load_state_dict(behind)
            assert [rows([batch]) for batch in resumed] == reference[max(0, step - 2) :]
        seen = {sample[0] for batch in whole for sample in batch}
        assert seen == set(range(0, _SAMPLES, _RANKS)) - _BAD


def test_without_workers_a_resumed_run_repeats_the_same_sample() -> None:
    loader = _loader(IN_ORDER, 0)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(4)]
    resumed = _loader(IN_ORDER, 0)
    resumed.load_state_dict(through_json(loader.state_dict()))
    _check(_indices([*first, *resumed]), {**resumed.stats(), **_sums(loader, resumed)}, len(_EMPTY))


def _sums(*loaders: Any) -> dict[str, int]:
    names = ("samples_delivered", "samples_padded", "samples_failed", "batches_delivered")
    return {name: sum(loader.stats()[name] for loader in loaders) for name in names}


def test_ranks_that_are_merged_go_on() -> None:
    states = []
    for rank in range(_RANKS):
        loader = _loader(IN_ORDER, 2, rank)
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        states.append(through_json(loader.state_dict()))
    resumed = _loader(IN_ORDER, 2)
    resumed.load_state_dict(merge_state_dicts(states))
    batches = _indices(resumed)
    assert len(batches) == _BATCHES - 4 and batches[0] == batches[1] == [30]


def test_a_damaged_survivor_is_refused() -> None:
    loader = _loader(IN_ORDER, 2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    assert state["progress"]["survivor"] == {"position": 11, "key": 22, "occurrence": 0}
    for damage in (3, {"position": -1, "key": 1, "occurrence": 0}, {"position": 1, "key": {}, "occurrence": 0}):
        bad = {**state, "progress": {**state["progress"], "survivor": damage}}
        with pytest.raises(ValueError, match="state"):
            _loader(IN_ORDER, 2).load_state_dict(bad)
