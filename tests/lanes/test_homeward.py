"""Results that a ``collate_fn`` joins on the host go home together, and nobody waits for that first."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.lanes.base import Local
from minato_gpu.lanes.device_output import DeviceOutput
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.device_budget import DeviceBudget
from minato_gpu.memory.host import Host
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.transfers import Transfers
from tests.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice, FakeStream
from tests.fake_work import Copy
from tests.lanes.harness import open_links, piece, task

MADE = frozenset({"image", "count", "word"})
COUNT = 20


def sample(number: int) -> dict[str, Any]:
    image = np.full((2, 1 + number), number, np.float32)
    return {"image": image, "count": np.array(number), "word": "a", "label": number, "name": np.full(2, number)}


@pytest.fixture(params=[LAZY_COPIES, LAZY_CONSUMER, 4])
def device(request: pytest.FixtureRequest) -> FakeDevice:
    return FakeDevice(request.param)


def _stream(outlet: DeviceOutput) -> FakeStream:
    stream: Any = outlet.stream
    assert isinstance(stream, FakeStream)
    return stream


def _single(outlet: DeviceOutput) -> list[Copy]:
    """Copies of one block, which have been issued: what lies side by side was many."""
    return [work for work in _stream(outlet).work if isinstance(work, Copy) and len(work.targets) == 1]


@pytest.mark.parametrize("layout", [None, b""])
def test_a_micro_batch_goes_home_in_one_copy_while_the_next_is_issued(device: FakeDevice, layout: Any) -> None:
    with open_links(1) as links:
        host = Host(links.engine_arena, links.loans, device)
        transfers = Transfers(device, host, DeviceBudget(1 << 20))
        outlet = DeviceOutput(Store(-1, links), transfers)
        asked = task(piece(range(COUNT)), layout=layout)
        issued = []
        for _ in range(2):
            outlet.reserve(asked, MADE, COUNT)
            with outlet.working():
                items = [outlet.put(asked, asked.pieces[0], n, sample(n), MADE) for n in range(COUNT)]
                before = _stream(outlet).issued
                home = _single(outlet)
                issued.append(outlet.issued(items))
        if device.order == LAZY_COPIES:
            assert _stream(outlet).done == 0, "nobody has waited"
            assert len(_single(outlet)) == len(home) + 1
            assert _stream(outlet).issued - before <= 3, "laid side by side by element type, then copied"
            assert not any(one.through for one in issued)
        assert device.fetched == 0 and transfers.budget.held["samples"] > 0
        for one in issued:
            for number, item in enumerate(outlet.settle(one)):
                assert isinstance(item, Local)
                for name, wanted in sample(number).items():
                    got = item.value[name]
                    assert type(got) is (np.int64 if name == "count" else type(wanted)) and np.array_equal(got, wanted)
        assert (outlet.layout is None) is (layout is None)
        if outlet.layout is not None:
            of_first: Any = Layout.of({**sample(0), "count": np.int64(0), "image": np.zeros((2, COUNT), np.float32)})
            assert [leaf.shape for leaf in pickle.loads(outlet.layout).leaves] == [
                leaf.shape for leaf in of_first.leaves
            ]
        issued.clear()
        del one
        assert transfers.budget.held["samples"] == 0
        device.finish()
        assert device.used == 0
        transfers.close()
        host.close()


@pytest.fixture
def links() -> Iterator[WorkerChannels]:
    """Their memory is there until a failure has been told, which looks into it."""
    with open_links(1) as links:
        yield links


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_tensors_that_pass_through_stay_tensors_of_the_host(
    links: WorkerChannels, dtype: torch.dtype, lent: bool, on_device: bool
) -> None:
    device = FakeDevice()
    host = Host(links.engine_arena, links.loans, device)
    transfers = Transfers(device, host, DeviceBudget(None))
    outlet = DeviceOutput(Store(-1, links), transfers if on_device else None)
    fields = {"given": torch.full((2, 3), 7).to(dtype).t(), "scalar": torch.tensor(7)}
    source = Store(0, links, links.arenas[0]).put(fields) if lent else Local(fields, 0)
    asked = task(piece(range(1), sources=[source]), layout=b"")
    with outlet.working():
        result = {**_given(links, source), "image": np.full(2, 7, np.float32)}
        item = outlet.put(asked, asked.pieces[0], 0, result, MADE)
        issued = outlet.issued([item])
    outlet.settle(issued)
    assert isinstance(item, Local)
    for name, wanted in fields.items():
        got = item.value[name]
        assert type(got) is torch.Tensor and got.dtype is wanted.dtype and torch.equal(got, wanted)
        assert got.stride() == wanted.stride()
    assert type(item.value["image"]) is np.ndarray
    found: Any = Layout.of({**fields, "image": np.full(2, 7, np.float32)})
    assert outlet.layout is not None and pickle.loads(outlet.layout) == found
    del issued
    transfers.close()
    host.close()


def _given(links: WorkerChannels, source: Any) -> dict[str, Any]:
    """What the device lane is given of a sample."""
    fields: dict[str, Any] = Store(-1, links).get(source)
    return fields
