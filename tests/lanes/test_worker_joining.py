"""Batches that are joined by the worker that has prepared their samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader, Field, Pipeline, Stage
from minato_gpu.lanes.base import Blob, Failure, NoSample, Row
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import LIMIT
from minato_gpu.pipeline import TorchFunction
from tests.contracts.datasets import Made
from tests.lanes.harness import Bench, Slab, a_sample, error_of, items_of, job, piece, task, values
from tests.memory.equality import same


def test_whole_batches_are_joined_at_once(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: key, collate_fn=list))
    items = items_of(bench.run(task(piece(range(3), whole=True), piece([7, 8], position=3, whole=True))))
    assert [type(item) for item in items] == [Blob, type(None), type(None), Blob, type(None)]
    assert items[0].collated and bench.store.get(items[0]) == [0, 1, 2] and bench.store.get(items[3]) == [7, 8]


def test_a_whole_batch_cut_short_goes_out_in_single_samples(links: WorkerChannels) -> None:
    def make(key: int) -> int:
        if key == 1:
            bench.set_word(LIMIT, 2)
        return key

    bench = Bench(links, job(make, collate_fn=list))
    items = items_of(bench.run(task(piece(range(4), whole=True))))
    assert [bench.store.get(item) for item in items] == [0, 1]
    assert not any(item.collated for item in items)


def test_a_batch_cut_short_after_a_batch_with_a_failure_keeps_its_samples(links: WorkerChannels) -> None:
    """Two batches in one chunk: the first has a bad sample, the second is cut short by a limit."""

    def make(key: int) -> int:
        if key == 3:
            raise ValueError("three")
        if key == 5:
            bench.set_word(LIMIT, 6)
        return key

    bench = Bench(links, job(make, collate_fn=list))
    items = items_of(bench.run(task(piece(range(4), whole=True), piece(range(4, 8), position=4, whole=True))))
    assert isinstance(items[3], Failure) and len(items) == 6
    assert [bench.store.get(item) for item in items[4:]] == [4, 5]


def test_a_failure_in_one_batch_leaves_the_others_alone(links: WorkerChannels) -> None:
    def make(key: int) -> int:
        if key == 1:
            raise ValueError("one")
        return key

    bench = Bench(links, job(make, collate_fn=list))
    items = items_of(bench.run(task(piece(range(3), whole=True), piece([7, 8], position=3, whole=True))))
    assert error_of(items[1])[0] is ValueError
    assert bench.store.get(items[3]) == [7, 8]


@pytest.mark.parametrize("kind", ["run", "collate"])
def test_what_collate_raises_names_the_batch(links: WorkerChannels, kind: str) -> None:
    def collate(samples: list[int]) -> Any:
        raise TypeError(f"cannot join {samples}")

    bench = Bench(links, job(lambda key: key, collate_fn=collate))
    if kind == "run":
        reports = bench.run(task(piece([30, 31], position=8, whole=True)))
    else:
        items = [bench.store.put(30), bench.store.put(31)]
        reports = bench.run(task(piece([30, 31], position=8), kind="collate", items=items))
    failure = (reports[-1].items or [])[0]
    assert isinstance(failure, Failure) and failure.collated
    kind_, text = error_of(failure)
    assert kind_ is TypeError
    for part in ("cannot join [30, 31]", "collate", "epoch 0", "positions 8 to 9", "indices [30, 31]"):
        assert part in text


@pytest.mark.parametrize("kind", ["blob", "row"])
def test_what_a_collate_fn_keeps_of_a_sample_stays_as_it_is(links: WorkerChannels, kind: str) -> None:
    """The memory that it was handed over in is used again for other samples."""
    kept: list[Any] = []

    def collate(samples: list[Any]) -> int:
        kept.extend(samples)
        return len(samples)

    bench, slab = Bench(links, job(lambda key: key, collate_fn=collate)), Slab(links, a_sample(0), 1)
    rows, blob = slab.layout.views(links.engine_arena.buffer, slab.offset, 1), bench.store.put(a_sample(3))
    assert isinstance(blob, Blob)
    slab.layout.write(rows, 0, a_sample(3))
    items: list[Any] = [blob if kind == "blob" else Row(slab.offset, 1, 0, slab.bytes, ["n3"])]
    bench.run(task(piece([3]), kind="collate", items=items))
    slab.layout.write(rows, 0, a_sample(4))
    for offset, nbytes in blob.blocks:
        links.buffer(blob.worker)[offset : offset + nbytes] = bytes(nbytes)
    same(kept, [a_sample(3)])


def test_a_job_joins_rows_and_objects(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: key, collate_fn=lambda samples: samples))
    slab = Slab(links, a_sample(0), 2)
    slab.layout.write(slab.layout.views(links.engine_arena.buffer, slab.offset, 2), 1, a_sample(6))
    items = [bench.store.put("x"), Row(slab.offset, 2, 1, slab.bytes, ["n6"])]
    report = bench.run(task(piece([1, 6]), kind="collate", items=items))[-1]
    same(bench.store.get((report.items or [])[0]), ["x", a_sample(6)])


class _Unloadable:
    """Can be sent, and not be loaded."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_job_prepares_what_it_cannot_load(links: WorkerChannels) -> None:
    """All of its batch, and says so; a ``collate_fn`` makes something of it."""
    bench = Bench(links, job(lambda key: _Unloadable(), collate_fn=lambda samples: [type(one) for one in samples]))
    items = [bench.store.put(3), bench.store.put(_Unloadable())]
    report = bench.run(task(piece([1, 6]), kind="collate", items=items))[-1]
    assert bench.store.get((report.items or [])[0]) == [_Unloadable, _Unloadable]
    assert report.repeated == 2


def test_a_batch_of_no_keys(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: key, collate_fn=lambda samples: ("joined", samples)))
    items = items_of(bench.run(task(piece([NoSample()], whole=True))))
    assert bench.store.get(items[0]) == ("joined", [])


@pytest.mark.parametrize("again", ["repeats", "retries"])
def test_what_was_read_is_not_changed_where_samples_may_be_begun_again(links: WorkerChannels, again: str) -> None:
    """A worker that dies in a chunk leaves what a stage that works in place has made of it."""

    def double(fields: Any, _: Any) -> Any:
        fields["x"] *= np.float32(2)
        return {"x": fields["x"]}

    x = Field(np.float32, (3,))
    stage = Stage(
        "double", ("x",), {"x": x}, cpu=double, device=TorchFunction(lambda fields, _: {"x": fields["x"] * 2})
    )
    read = Stage("read", ("n",), {"x": x}, cpu=lambda fields, _: {"x": np.full(3, fields["n"], np.float32)})
    pipeline = Pipeline((read, stage), outputs=("x",))
    bench = Bench(links, job(lambda key: {"n": key}, pipeline=pipeline, **{again: True}))
    found = items_of(bench.run(task(piece([5, 6]), kind="inspect")))
    sources = [item.fields for item in found]
    for chunk in (2, 3):
        prepared = values(bench, bench.run(task(piece([5, 6], sources=sources), chunk=chunk)))
        assert [float(sample["x"][0]) for sample in prepared] == [10.0, 12.0]


def test_workers_that_are_replaced_know_that_samples_may_be_begun_again() -> None:
    for on_worker_death in ("raise", "replace"):
        iterator: Any = iter(DataLoader(Made(4, int), num_workers=1, on_worker_death=on_worker_death))
        lane = iterator._engine.pump.lanes["cpu"]
        assert lane._pool._job.repeats == (on_worker_death == "replace")
