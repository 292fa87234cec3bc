"""Every device keeps its own budget of bytes, and a small one stops nothing."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

import minato_gpu.engine.settings
from minato_gpu.device.copies import CopyRange
from minato_gpu.device.loads import DeviceRow, MicroBatchOutput, rows_bytes
from minato_gpu.lanes.base import Resident
from minato_gpu.memory.layout import Layout
from tests.contracts.checks import NOTHING, differences
from tests.device.several import SAMPLE_BYTES, Gated, Machine, consume, labels, loader_on
from tests.support.device_batches import check_same, reference
from tests.support.fake_device import LAZY_COPIES, FakeDevice
from tests.support.numbers import BATCH, LENGTH, PIPELINE, Plain
from tests.support.waiting import wait_until

LAYOUT = Layout.of(PIPELINE.run({"n": 0}, 0))
assert LAYOUT is not None
BATCH_BYTES = rows_bytes(LAYOUT, BATCH)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("lanes", [["device"], ["cpu"], ["cpu", "device"]], ids="+".join)
@pytest.mark.parametrize("budget", [1, 6000, 3 * BATCH_BYTES])
def test_each_device_keeps_its_budget(machine: Machine, budget: int, lanes: list[str], in_order: bool) -> None:
    """At most the budget (or one batch) and one sample, besides the batch that its consumer has; and so it says."""
    devices = machine(2, LAZY_COPIES)
    loader = loader_on(devices, lanes=lanes, in_order=in_order, device_memory_budget=budget, prefetch_factor=8)
    assert differences(range(LENGTH), [n for b in labels(consume(devices, loader)) for n in b]) == NOTHING
    most = max(budget, BATCH_BYTES) + SAMPLE_BYTES
    for device, stats in zip(devices, loader.stats()["device"], strict=True):
        assert BATCH_BYTES <= stats["device_bytes_peak"] <= most
        assert device.peak <= stats["device_bytes_peak"] + BATCH_BYTES


@pytest.mark.parametrize(
    "holder",
    [
        lambda made, tensor: DeviceRow(made, 0, 0, tensor, CopyRange(0, 0, 4)),
        lambda made, tensor: Resident([], leaves={0: tensor}, made=made),
    ],
    ids=["of a load", "of a sample"],
)
def test_what_a_device_made_is_free_before_its_bytes_are_given_back(holder: Any) -> None:
    """Else another thread may take them in between, and the device holds more than its budget."""
    over: list[str] = []
    device = FakeDevice()
    made, tensor = MicroBatchOutput(None, device), torch.zeros(1)
    weakref.finalize(made, over.append, "account")
    weakref.finalize(tensor, over.append, "memory")
    held = holder(made, tensor)
    del made, tensor
    assert not over
    del held
    assert over == ["memory", "account"]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("lanes", [["device"], ["cpu"]], ids="+".join)
def test_without_a_budget_a_few_batches_go_to_a_device_and_not_the_whole_window(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, lanes: list[str], in_order: bool
) -> None:
    """The consumer takes the first batch and is away until the window is prepared, 16 batches. A device lane stops when
    its device is full: what it made beyond that would go to the host, and back."""
    monkeypatch.setattr(minato_gpu.engine.settings, "MICRO_BATCH", 4)
    monkeypatch.setattr(minato_gpu.engine.settings, "MOST_ON_GPU", 4)
    devices = machine(1, LAZY_COPIES)
    loader = loader_on(devices, num_workers=1, lanes=lanes, in_order=in_order, prefetch_factor=16)
    batches = iter(loader)
    seen = consume(devices, [next(batches)])
    (lane,) = lanes
    assert wait_until(lambda: loader.stats()["lanes"][lane]["samples"] >= (16 if lane == "cpu" else 2) * BATCH)
    assert lane == "cpu" or loader.stats()["device_lane"]["spilled_to_host"] <= BATCH, "while the first was waited for"
    seen += consume(devices, batches)
    assert sorted(n for batch in labels(seen) for n in batch) == list(range(LENGTH))
    assert BATCH_BYTES <= loader.stats()["device"]["device_bytes_peak"] <= 4 * BATCH_BYTES + 4 * SAMPLE_BYTES


def test_a_small_budget_does_not_stop_where_a_later_batch_is_ready_first(machine: Machine) -> None:
    """Its device has room for one batch, and the first to be complete is not the first to be delivered."""
    devices, gate = machine(2, LAZY_COPIES), threading.Event()
    loader = loader_on(devices, Gated(3, gate), worker_kind="thread", device_memory_budget=1, prefetch_factor=3)
    iterator = iter(loader)
    transfers = iterator._engine.assembly.loading.transfers
    threading.Timer(0.2, gate.set).start()
    check_same(consume(devices, iterator), reference(Plain()))
    assert all(one.budget.held["batches"] == 0 for one in transfers)
