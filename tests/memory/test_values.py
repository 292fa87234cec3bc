"""What a ``collate_fn`` made comes to the device from pinned memory, in few copies."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from minato_gpu.memory.copies import MOST
from minato_gpu.memory.values import ValueLoad
from tests.fake_device import FakeDevice
from tests.memory.bench import ORDERS, bench
from tests.waiting import wait_until


def detections(count: int) -> dict[str, Any]:
    """As for object detection: one large tensor, and lists of small ones, of all shapes."""
    return {
        "image": torch.arange(count * 4000.0).view(count, 4000),
        "boxes": [torch.full((number % 5, 4), float(number)) for number in range(count)],
        "labels": [torch.full((number % 5,), number) for number in range(count)],
        "crowd": [torch.tensor(number % 2 == 0) for number in range(count)],
        "phase": torch.tensor([1 + 2j, 3]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "spread": torch.arange(3).expand(2, 3),
        "last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("order", ORDERS)
def test_all_comes_from_pinned_memory_in_few_copies(order: Any) -> None:
    device, wrong = FakeDevice(order), list[Any]()
    wanted = detections(64)
    with bench(device) as one:
        load = ValueLoad(lambda: detections(64), 48)
        one.submit(load)
        batch = one.take(load)
        assert one.transfers.stats()["copies"] <= MOST
        assert not any("not pinned" in what for _, what in device.waited)
        for name, value in wanted.items():
            pairs = zip(batch[name], value, strict=True) if isinstance(value, list) else [(batch[name], value)]
            for got, each in pairs:
                assert (got.dtype, got.shape) == (each.dtype, each.shape)
                device.read(got, lambda t, each=each: wrong.append(t) if not torch.equal(t, each) else None)  # type: ignore[misc]
        assert batch["last"].is_contiguous(memory_format=torch.channels_last)
        device.finish()
        assert one.allocated() == 0, "what they were copied from is free"
    assert wrong == []


def test_a_long_list_of_large_tensors_is_no_long_list_of_copies() -> None:
    with bench(FakeDevice()) as one:
        load = ValueLoad(lambda: [torch.full((50_000,), float(n)) for n in range(30)], 48)
        one.submit(load)
        batch = one.take(load)
        assert one.transfers.stats()["copies"] < MOST
        one.device.finish()
        assert [float(each[-1]) for each in batch] == list(range(30))


def test_labels_do_not_keep_pictures() -> None:
    with bench(FakeDevice()) as one:
        load = ValueLoad(lambda: {"image": torch.zeros(10_000), "label": torch.arange(4)}, 48)
        one.submit(load)
        labels = one.take(load)["label"]
        one.device.finish()
        one.transfers.sweep()
        gc.collect()
        assert wait_until(lambda: one.device.used == labels.nbytes)
