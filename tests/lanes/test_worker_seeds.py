"""What a worker does about random numbers: none are seeded until a sample draws, and then they are the sample's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.lanes.base import Failure
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.samples import sample_seed
from tests.lanes.harness import Bench, Slab, draws, error_of, items_of, job, piece, task, values

_SOURCES: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": np.random.random_sample,
    "torch": lambda: torch.rand((), dtype=torch.float64).item(),
}


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "blobs"])
@pytest.mark.parametrize("first", [0, 13, 29], ids="first draw at {}".format)
@pytest.mark.parametrize("source", _SOURCES.values(), ids=_SOURCES.keys())
def test_a_chunk_that_draws_unseeded_is_done_again_seeded(
    links: WorkerChannels, source: Callable[[], float], first: int, rows: bool
) -> None:
    """Same content as from chunks of one; samples before the first draw and the memory of the first try included."""
    calls: list[int] = []

    def make(key: int) -> Any:
        calls.append(key)
        return {"key": key, "draw": source() if key >= first else -1.0}

    bench = Bench(links, job(make))
    slab = Slab(links, {"key": 1, "draw": 1.0}, 30)
    one = piece(range(30), slab=slab.offset if rows else -1)
    got = bench.run(task(one, layout=slab.bytes if rows else None))
    samples = (
        values(bench, got)
        if not rows
        else [
            slab.layout.read(slab.layout.views(links.engine_arena.buffer, slab.offset, 30), row, None)
            for row in range(30)
        ]
    )
    assert len(calls) > 30, "the chunk was not tried without seeds first"
    assert calls[-1] == 29 and set(calls) == set(range(30))
    other = Bench(links, job(make), number=1)
    alone = [values(other, other.run(task(piece([key], position=key), chunk=key + 2)))[0] for key in range(30)]
    assert samples == alone
    assert len({sample["draw"] for sample in samples[first:]}) == 30 - first
    if not rows:
        assert bench.arena is not None and bench.arena.allocated == 30 * 4096, "blobs of the first try were not freed"


def test_a_chunk_without_draws_is_done_once(links: WorkerChannels) -> None:
    calls: list[int] = []

    def make(key: int) -> int:
        calls.append(key)
        return key

    bench = Bench(links, job(make))
    for chunk in range(3):
        assert values(bench, bench.run(task(piece(range(20)), chunk=chunk))) == list(range(20))
    assert calls == [*range(20)] * 3


def test_draws_depend_on_seed_key_and_occurrence_alone(links: WorkerChannels) -> None:
    def drawn(bench: Bench, *keys: int, **more: Any) -> list[Any]:
        return values(bench, bench.run(task(piece(keys, **more))))

    first, second = Bench(links, job(lambda key: draws())), Bench(links, job(lambda key: draws()), number=1)
    in_order = drawn(first, *range(12))
    assert drawn(second, *reversed(range(12)), position=500) == in_order[::-1]
    twice = drawn(first, 3, 3, 3, occurrences=[0, 1, 0])
    assert twice[0] == twice[2] == in_order[3] and twice[1] not in in_order
    other = values(first, first.run(task(piece([3]))._replace(seed=78)))
    assert other[0] not in in_order


def test_seeds_are_those_of_samples(links: WorkerChannels) -> None:
    """What a user can compute: the sample's own seed, from the epoch's."""
    bench = Bench(links, job(lambda key: draws()))
    got = values(bench, bench.run(task(piece(["a", 5]))))
    for key, sample in zip(["a", 5], got, strict=True):
        seed = sample_seed(77, 0, key, 0)
        assert sample[2] == random.Random(seed).random()


@pytest.mark.parametrize("size", [1, 30])
def test_a_samples_error_in_an_unseeded_chunk_does_not_hide_draws(links: WorkerChannels, size: int) -> None:
    def make(key: int) -> Any:
        if key % 10 == 5:
            raise ValueError(f"{key}: {random.random()}")
        return random.random()

    bench, other = Bench(links, job(make)), Bench(links, job(make), number=1)
    got = items_of(bench.run(task(piece(range(5, 5 + size)))))
    for key, item in zip(range(5, 5 + size), got, strict=True):
        alone = items_of(other.run(task(piece([key]))))[0]
        if isinstance(item, Failure):
            text = str(random.Random(sample_seed(77, 0, key, 0)).random())
            assert text in error_of(item)[1] and text in error_of(alone)[1]
        else:
            assert bench.store.get(item) == other.store.get(alone)


def test_worker_init_functions_seed_is_kept_in_samples(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: torch.initial_seed(), worker_init_fn=lambda number: torch.manual_seed(31)))
    for keys in (range(3), range(30)):
        assert set(values(bench, bench.run(task(piece(keys))))) == {31}
