"""The device lane, with DALI's CPU operators where there is no GPU: fall-back, rows, closing."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset

from minato_gpu import DataLoader, Pipeline, Stage
from minato_gpu.lanes.base import Extra, Failure, Local, Report, Resident
from minato_gpu.lanes.contract import Opened
from minato_gpu.lanes.device_lane import DeviceLane
from minato_gpu.lanes.functions import FunctionSegment
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.device_budget import DeviceBudget
from minato_gpu.memory.host import Host
from minato_gpu.memory.status_board import ATTENTION
from minato_gpu.memory.transfers import Transfers
from minato_gpu.pipeline import Field, TorchFunction
from minato_gpu.samples import sample_seed
from tests.lanes.harness import Slab, open_links, piece, task
from tests.lanes.lanes import of_kind
from tests.memory.equality import same
from tests.support.fake_device import FakeDevice, FakeEvent
from tests.support.waiting import wait_until

X = Field(np.float32, (2,))


def _read(fields: Any, params: Any) -> Any:
    return {"x": np.full(2, fields["n"], np.float32), "label": fields["n"]}


def _draw(rng: np.random.Generator, meta: Any) -> Any:
    return {"shift": float(rng.uniform(0, 1))}


def _cpu(fields: Any, params: Any) -> Any:
    if fields["x"][0] == 13:
        raise ValueError("thirteen fails everywhere")
    return {"x": (fields["x"] + np.float32(params["shift"])).astype(np.float32)}


def _device(fields: Any, params: Any) -> Any:
    if fields["x"][0] in (7, 13):
        raise ValueError("no such operation on this device")
    return {"x": fields["x"] + torch.tensor(params["shift"], dtype=torch.float32)}


PIPELINE = Pipeline(
    (
        Stage("read", reads=("n",), writes={"x": X, "label": Field(np.int64)}, cpu=_read),
        Stage("shift", reads=("x",), writes={"x": X}, cpu=_cpu, draw=_draw, device=TorchFunction(_device)),
    ),
    outputs=("x", "label"),
    name="tests",
)


class Numbers(Dataset[Any]):
    """Sample ``n`` is the number n."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, n: int) -> Any:
        return {"n": n}


def expected(key: int, seed: int) -> Any:
    """What the CPU makes of it."""
    return PIPELINE.run({"n": key}, seed)


@pytest.fixture
def links() -> Iterator[WorkerChannels]:
    with open_links(1) as links:
        yield links


@pytest.fixture
def lane(links: WorkerChannels) -> Iterator[DeviceLane]:
    lane = DeviceLane(links, PIPELINE, "cpu", 4)
    yield lane
    assert lane.close(5.0)


def sources(keys: list[int]) -> list[Any]:
    """What the host read left of each sample."""
    return [Local(PIPELINE.run({"n": key}, 0, stop=1), 8) for key in keys]


def report_of(lane: DeviceLane) -> Report:
    """The one report that is to come."""
    (report,) = of_kind(lane, Report)
    return report


def test_results_are_those_of_the_cpu(lane: DeviceLane) -> None:
    """The same draws; more samples than a micro-batch holds."""
    keys = list(range(20, 30))
    lane.send(task(piece(keys, sources=sources(keys), occurrences=[0] * 9 + [3])))
    report = report_of(lane)
    assert report.final and report.done == 10 and report.repeated == 0
    for key, occurrence, item in zip(keys, [0] * 9 + [3], report.items or [], strict=True):
        assert isinstance(item, Local)
        want = expected(key, sample_seed(77, 0, key, occurrence))
        assert isinstance(item, Local)
        assert np.allclose(item.value["x"], want["x"], atol=1e-6) and item.value["label"] == key


def test_rows_are_written(lane: DeviceLane, links: WorkerChannels) -> None:
    slab = Slab(links, expected(1, 0), 3)
    lane.send(task(piece([4, 5, 6], slab=slab.offset, sources=sources([4, 5, 6])), layout=slab.bytes))
    assert report_of(lane).items is None
    assert slab.batch()["label"].tolist() == [4, 5, 6]
    assert [int(x) for x in slab.batch()["x"][:, 0]] == [4, 5, 6]


def test_a_sample_that_fails_on_the_device_runs_on_the_cpu_and_is_counted(lane: DeviceLane) -> None:
    lane.send(task(piece([6, 7, 8], sources=sources([6, 7, 8]))))
    report = report_of(lane)
    items = report.items or []
    for key, item in zip([6, 7, 8], items, strict=True):
        assert isinstance(item, Local)
        assert np.allclose(item.value["x"], expected(key, sample_seed(77, 0, key))["x"], atol=1e-6)
    assert report.repeated == 1


def test_a_sample_that_fails_on_both_is_a_failure_with_its_origin(lane: DeviceLane) -> None:
    lane.send(task(piece([12, 13, 14], position=50, sources=sources([12, 13, 14]))))
    items = report_of(lane).items or []
    assert isinstance(items[0], Local) and isinstance(items[2], Local) and isinstance(items[1], Failure)
    with pytest.raises(ValueError, match="thirteen fails everywhere") as caught:
        items[1].error.reraise()
    for part in ("epoch 0", "position 51", "index 13", "stage 'shift'", "device"):
        assert part in str(caught.value)


def test_a_failed_host_read_stays_that_failure(lane: DeviceLane) -> None:
    try:
        raise OSError("unreadable")
    except OSError:
        failed = Failure(ExceptionWrapper(where="reading"))
    given = sources([1, 2, 3])
    given[1] = failed
    lane.send(task(piece([1, 2, 3], sources=given)))
    report = report_of(lane)
    items = report.items or []
    assert items[1] is failed and isinstance(items[0], Local) and isinstance(items[2], Local)
    assert report.repeated == 0


def test_recall_wake_up_and_close(lane: DeviceLane, links: WorkerChannels) -> None:
    links.board.words[ATTENTION], thread = 1, lane._thread
    lane.send(task(piece([1], sources=sources([1])), chunk=1))
    report_of(lane)
    assert os.eventfd_read(links.wake) >= 1
    lane.recall()
    assert lane.receive() == []
    assert lane.close(5.0) and lane.close(5.0)
    assert thread is not None and not thread.is_alive()


def test_text_beside_rows() -> None:
    pipeline = Pipeline(
        (
            Stage(
                "read",
                reads=("n",),
                writes={"x": X, "name": Field(object)},
                cpu=lambda fields, params: {"x": np.full(2, fields["n"], np.float32), "name": f"n{fields['n']}"},
            ),
            Stage(
                "same",
                reads=("x",),
                writes={"x": X},
                cpu=lambda fields, params: {"x": fields["x"]},
                device=TorchFunction(lambda fields, params: {"x": fields["x"] + 0}),
            ),
        ),
        outputs=("x", "name"),
        name="text",
    )
    with open_links(1) as links:
        lane = DeviceLane(links, pipeline, "cpu", 4)
        slab = Slab(links, pipeline.run({"n": 1}, 0), 2)
        given = [Local(pipeline.run({"n": key}, 0, stop=1), 8) for key in (3, 4)]
        lane.send(task(piece([3, 4], slab=slab.offset, sources=given), layout=slab.bytes))
        items = report_of(lane).items or []
        objects = [item.objects for item in items if isinstance(item, Extra)]
        assert objects == [["n3"], ["n4"]]
        assert slab.batch(objects)["x"][:, 0].tolist() == [3, 4]
        lane.close(5.0)


def _two_epochs(lanes: list[str]) -> tuple[list[Any], list[Any]]:
    """Batches and stats of each epoch, without the sample that fails everywhere."""
    keys = [key for key in range(40) if key != 13]
    generator = torch.Generator().manual_seed(3)
    more: dict[str, Any] = {"generator": generator, "pipeline": PIPELINE, "lanes": lanes, "persistent_workers": True}
    one = DataLoader(Numbers(), 4, sampler=keys, num_workers=1, **more)
    epochs, stats = [], []
    for _ in range(2):
        epochs.append([{name: tensor.clone() for name, tensor in batch.items()} for batch in one])
        stats.append(one.stats())
    return epochs, stats


@pytest.mark.parametrize("lanes", [["device"], ["cpu", "device"]], ids="+".join)
def test_a_whole_loader_gives_the_cpus_batches(lanes: list[str]) -> None:
    """Also for the sample that the device refuses, in both epochs."""
    (reference, _), (got, stats) = _two_epochs(["cpu"]), _two_epochs(lanes)
    for ours, theirs in zip(got, reference, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            same(one["label"], other["label"])
            assert torch.allclose(one["x"], other["x"], atol=1e-6)
    for each in stats:
        assert sum(lane["samples"] for lane in each["lanes"].values()) == 39


def test_repeats_are_counted_for_each_epoch_by_itself() -> None:
    _, stats = _two_epochs(["cpu", "device"])
    assert all(each["samples_repeated"] <= 1 for each in stats)


def test_the_device_lane_alone_prepares_everything() -> None:
    """The CPU workers then only read."""
    _, stats = _two_epochs(["device"])
    assert [each["lanes"]["device"]["samples"] for each in stats] == [39, 39]


def _busy(fields: Any, params: Any) -> Any:
    end = time.thread_time() + 4e-3
    while time.thread_time() < end:
        pass
    return _device(fields, params)


def test_a_device_that_works_alone_takes_whole_micro_batches() -> None:
    """Beside a CPU lane a dispatch of costly samples is short, so that they can still go elsewhere."""
    stages = (PIPELINE.stages[0], dataclasses.replace(PIPELINE.stages[1], device=TorchFunction(_busy)))
    pipeline = Pipeline(stages, outputs=("x", "label"), name="tests")
    more: dict[str, Any] = {"pipeline": pipeline, "lanes": ["device"], "persistent_workers": True}
    one = DataLoader(Numbers(), 10, sampler=[*range(7)] * 6, num_workers=1, **more)
    for _ in range(3):
        for _ in one:
            pass
    counts = [span[6] for span in one.timeline()["spans"] if span[2] == "device"]
    assert sum(counts) == 42 and max(counts) > 3, counts  # of 4 ms each; three where 10 ms are the aim


class _Gated(FakeDevice):
    """The host waits for an event only once the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def event(self, timed: bool = False) -> Any:
        """See Accelerator."""
        device = self

        class Event(FakeEvent):
            def synchronize(self) -> None:
                assert device.gate.wait(20)
                super().synchronize()

        return Event(self, self.current)


@pytest.fixture
def gated(links: WorkerChannels) -> Iterator[tuple[_Gated, DeviceLane]]:
    device = _Gated()
    host = Host(links.engine_arena, links.loans, device)
    transfers = Transfers(device, host, DeviceBudget(None))
    lane = DeviceLane(links, PIPELINE, "cpu", 4, transfers=transfers)
    yield device, lane
    device.gate.set()
    assert lane.close(5.0)
    transfers.close()
    host.close()


def test_a_device_has_two_micro_batches_in_flight(
    gated: tuple[_Gated, DeviceLane], links: WorkerChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is issued while the first is waited for; a third is not; reports come in order, each with its own."""
    begun: list[int] = []
    run = FunctionSegment.run

    def recorded(self: FunctionSegment, batch: Any, drawn: Any) -> Any:
        begun.append(int(batch[0]["label"]))
        return run(self, batch, drawn)

    monkeypatch.setattr(FunctionSegment, "run", recorded)
    device, lane = gated
    slabs = [Slab(links, expected(1, 0), 2) for _ in range(3)]
    for number, slab in enumerate(slabs):
        keys = [20 + 2 * number, 21 + 2 * number]
        lane.send(task(piece(keys, slab=slab.offset, sources=sources(keys)), chunk=number, layout=slab.bytes))
    assert wait_until(lambda: len(begun) == 2)
    assert lane.receive() == [Opened(1)] and begun == [20, 22]
    device.gate.set()
    reports: list[Report] = []

    def look() -> bool:
        reports.extend(told for told in lane.receive() if isinstance(told, Report))
        return len(reports) == 3

    assert wait_until(look)
    assert [report.chunk for report in reports] == [0, 1, 2] and begun == [20, 22, 24]
    for number, report in enumerate(reports):
        found = [item.leaves[0] for item in report.items or () if isinstance(item, Resident)]
        wanted = [expected(20 + 2 * number + at, sample_seed(77, 0, 20 + 2 * number + at, 0))["x"] for at in range(2)]
        with device.running(device.stream()):
            assert all(np.allclose(device.fetch(x, device.event()), y) for x, y in zip(found, wanted, strict=True))
    overlaps = [a.end > b.begin for a, b in itertools.pairwise(reports)]
    assert not any(overlaps), "no second of the device counts twice"


def test_closing_waits_for_what_is_in_flight(gated: tuple[_Gated, DeviceLane], links: WorkerChannels) -> None:
    device, lane = gated
    slab = Slab(links, expected(1, 0), 2)
    for number in range(2):
        lane.send(task(piece([20, 21], slab=slab.offset, sources=sources([20, 21])), chunk=number, layout=slab.bytes))
    threading.Timer(0.1, device.gate.set).start()
    assert wait_until(lane._tasks.empty)
    assert lane.close(5.0)
    assert device.gate.is_set() and len(device.streams) >= 2
