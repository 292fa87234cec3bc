"""Samples that go from the CPU lane to the device lane, or to another worker, in the middle of their pipeline."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import Pipeline, Stage
from minato_gpu.lanes.base import Failure, Handed, Local, Report
from minato_gpu.lanes.device_lane import DeviceLane
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.pipeline import CupyFunction, Field, TorchFunction
from minato_gpu.samples import sample_seed
from tests.lanes.harness import Bench, job, open_links, piece, task
from tests.lanes.lanes import of_kind

X = Field(np.float32, (2,))
runs: Counter[tuple[str, int]] = Counter()  # of each stage, by sample
gates: dict[int, tuple[threading.Event, threading.Event]] = {}  # a sample says that it runs, and waits to go on


def _read(fields: Any, params: Any) -> Any:
    return {"x": np.full(2, fields["n"], np.float32), "label": fields["n"]}


def _draw(rng: np.random.Generator, meta: Any) -> Any:
    return {"shift": float(rng.uniform(0, 1))}


def _shift(fields: Any, params: Any) -> Any:
    number = int(fields["x"][0])
    runs["shift", number] += 1
    if number in gates:
        running, go_on = gates[number]
        running.set()
        assert go_on.wait(30)
    if number == 13:
        raise ValueError("thirteen fails everywhere")
    return {"x": (fields["x"] + np.float32(params["shift"])).astype(np.float32)}


def _double(fields: Any, params: Any) -> Any:
    runs["double", int(fields["x"][0])] += 1
    return {"x": fields["x"] * np.float32(2)}


def _shift_on_device(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] + torch.tensor(params["shift"], dtype=torch.float32)}


def _double_on_device(xp: Any, fields: Any, params: Any) -> Any:
    runs["double on device", int(fields["x"][0])] += 1
    return {"x": fields["x"] * xp.float32(2)}


PIPELINE = Pipeline(
    (
        Stage("read", ("n",), {"x": X, "label": Field(np.int64)}, cpu=_read),
        Stage("shift", ("x",), {"x": X}, cpu=_shift, draw=_draw, device=TorchFunction(_shift_on_device)),
        Stage("double", ("x",), {"x": X}, cpu=_double, device=CupyFunction(_double_on_device)),
    ),
    outputs=("x", "label"),
    name="tests",
)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    runs.clear()
    gates.clear()


@pytest.fixture
def links() -> Iterator[WorkerChannels]:
    with open_links(1) as links:
        yield links


def bench(links: WorkerChannels, pipeline: Pipeline = PIPELINE) -> Bench:
    return Bench(links, job(lambda n: {"n": n}, pipeline=pipeline, cuts=pipeline.cuts))


def read(bench: Bench, keys: list[int], pipeline: Pipeline = PIPELINE, samples: Any = None) -> list[Any]:
    """What the host read leaves of each sample, where a worker would lay it."""
    given = [{"n": key} for key in keys] if samples is None else samples
    seeds = [sample_seed(77, 0, key) for key in keys]
    stop = pipeline.host_prefix
    return [bench.store.put(pipeline.run(fields, seed, stop=stop)) for fields, seed in zip(given, seeds, strict=True)]


def items_of(worker: Bench, given: Any) -> list[Any]:
    """What the worker's reports of this task refer to, sample by sample."""
    return [item for report in worker.run(given) for item in report.items or []]


def test_the_other_lane_goes_on_where_it_stopped_with_the_same_draws(links: WorkerChannels) -> None:
    worker = bench(links)
    keys = list(range(20, 26))
    handed = items_of(worker, task(piece(keys, sources=read(worker, keys)), stop=2))
    on_cpu = items_of(worker, task(piece(keys, sources=handed)))
    lane = DeviceLane(links, PIPELINE, "cpu", 4, may_retire=True)
    # half of them come from the start, half from the cut, in one micro-batch
    mixed = [*read(worker, keys[:3]), *handed[3:]]
    lane.send(task(piece(keys, sources=mixed)))
    on_device = of_kind(lane, Report)[0]
    assert lane.close(5.0)
    for key, here, there in zip(keys, on_cpu, on_device.items or [], strict=True):
        want = PIPELINE.run({"n": key}, sample_seed(77, 0, key))
        got = worker.store.get(here)
        assert got.keys() == want.keys() and np.array_equal(got["x"], want["x"])
        assert isinstance(there, Local)
        assert np.allclose(there.value["x"], want["x"], atol=1e-6) and there.value["label"] == key
    assert on_device.repeated == 0
    assert [part and part[0] for part in on_device.parts or []] == [1, 1, 1, 2, 2, 2]


def test_a_sample_that_runs_is_handed_over_at_its_next_cut(links: WorkerChannels) -> None:
    worker = bench(links)
    gates[30] = threading.Event(), threading.Event()
    chunk = task(piece([30], sources=read(worker, [30])), chunk=8)
    with worker.running(chunk) as reports:
        assert gates[30][0].wait(30)
        links.board.hand_over(1, 7, (2,))  # another one's
        links.board.hand_over(1, 8, (2,))
        gates[30][1].set()
    (item,) = reports[-1].items or []
    assert isinstance(item, Handed) and item.stage == 2
    (again,) = items_of(worker, task(piece([30], sources=[item]), chunk=9))
    want = PIPELINE.run({"n": 30}, sample_seed(77, 0, 30))
    runs.subtract({("shift", 30): 1})  # of the reference
    assert np.array_equal(worker.store.get(again)["x"], want["x"])
    assert runs["shift", 30] == 1, "no stage is applied twice"


def test_a_sample_is_handed_over_only_where_it_is_asked_for(links: WorkerChannels) -> None:
    """At another cut it would wait for a CPU worker: no device has a plan for it."""
    again = replace(PIPELINE.stages[2], name="again")
    worker = bench(links, Pipeline((*PIPELINE.stages, again), outputs=("x", "label"), name="tests"))
    gates[32] = threading.Event(), threading.Event()
    with worker.running(task(piece([32], sources=read(worker, [32])), chunk=8)) as reports:
        assert gates[32][0].wait(30)
        links.board.hand_over(1, 8, (3, 70))  # no word has a bit for stage 70
        gates[32][1].set()
    (item,) = reports[-1].items or []
    assert isinstance(item, Handed) and item.stage == 3


class _Stubborn:
    """Pickling it raises whatever it likes."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError(), ValueError(), RecursionError(), TypeError()], ids=repr)
def test_what_cannot_be_sent_goes_on_where_it_is(links: WorkerChannels, error: Exception) -> None:
    wrap = Stage("wrap", ("x",), {"h": Field(object)}, cpu=lambda fields, params: {"h": _Stubborn(error)})
    unwrap = Stage("unwrap", ("h",), {"x": X}, cpu=lambda fields, params: {"x": np.zeros(2, np.float32)})
    wrap, unwrap = (replace(stage, device=CupyFunction(_double_on_device)) for stage in (wrap, unwrap))
    pipeline = Pipeline((PIPELINE.stages[0], wrap, unwrap), outputs=("x", "label"), name="tests")
    worker = bench(links, pipeline)
    (item,) = items_of(worker, task(piece([3], sources=read(worker, [3], pipeline)), stop=2))
    assert not isinstance(item, (Failure, Handed))
    assert worker.store.get(item)["label"] == 3
