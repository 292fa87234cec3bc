"""What a real device does besides its work: its memory is held by others, and its errors come late."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from minato_gpu.lanes.base import Resident
from minato_gpu.lanes.device import DeviceExecutor
from minato_gpu.lanes.micro_batches import _PATIENCE
from tests.lanes import device_bench
from tests.lanes.device_bench import ROWS, SAMPLE_BYTES, bench, pipeline
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice, Order

ORDERS: list[Order] = [LAZY_COPIES, LAZY_CONSUMER, *range(4)]
KEYS = range(20, 20 + ROWS)


def test_pools_let_go_of_what_they_do_not_use_before_micro_batches_shrink() -> None:
    device = FakeDevice(LAZY_CONSUMER, capacity=4 * ROWS * SAMPLE_BYTES)
    device.pooled = device.capacity - SAMPLE_BYTES
    with bench(device) as one:
        one.send(*KEYS, chunk=1)
        assert one.reported(1)
        report, stats = one.report(1), one.lane.stats()
        assert report is not None and all(isinstance(item, Resident) for item in report.items or [None])
        assert (device.trims, stats["micro_batch"], stats["short_of_memory"]) == (1, ROWS, 1)
        assert report.times is None, "it took longer than others"


def test_what_shrank_grows_again_once_there_is_memory() -> None:
    device = FakeDevice(LAZY_CONSUMER)
    with bench(device) as one:
        device.capacity = ROWS * SAMPLE_BYTES // 2
        one.send(*KEYS, chunk=0)
        assert one.reported(0)
        small = one.lane.stats()["micro_batch"]
        assert small < ROWS
        device.capacity = 1 << 30
        for chunk in range(1, 5 * _PATIENCE):
            one.reports.clear()
            one.send(*KEYS, chunk=chunk)
            assert one.reported(chunk)
            if one.lane.stats()["micro_batch"] == ROWS:
                break
        assert one.lane.stats()["micro_batch"] == ROWS


def test_the_lanes_thread_lets_go_of_what_the_device_is_through_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a task is reported, and not only when the next one comes, which may be never."""
    swept: list[tuple[str, bool]] = []
    device = FakeDevice(LAZY_COPIES)

    def sweep(self: DeviceExecutor) -> None:
        swept.append((threading.current_thread().name, not any(stream.work for stream in device.streams)))

    monkeypatch.setattr(DeviceExecutor, "sweep", sweep)
    with bench(device) as one:
        one.send(*KEYS, chunk=1)
        assert one.reported(1)
        assert swept == [("minato-device", True)]


@pytest.mark.parametrize("order", ORDERS)
def test_an_error_that_comes_late_costs_no_sample(order: Order) -> None:
    """Whichever call it comes with, and although every call after that has it too: the CPU prepares what is left."""
    device = FakeDevice(order)
    fails = [1]

    def add(fields: Any, params: Any) -> Any:
        if fields["x"][0] == KEYS[3] and fails:
            fails.pop()
            device.fail(RuntimeError("an illegal memory access was encountered"))
        return device_bench.add(fields, params)

    with bench(device, pipeline(add)) as one:
        slabs = [one.send(*KEYS, chunk=chunk) for chunk in (1, 2)]
        assert one.reported(1) and one.reported(2)
        for slab, report in zip(slabs, one.reports, strict=True):
            assert report.items is None and report.repeated >= ROWS, "all of them lie in their rows"
            assert slab.batch()["x"][:, 0].tolist() == [2 * (key + 1) for key in KEYS]
        device.error = None  # the bench closes what a process would not
