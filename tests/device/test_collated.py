"""What a ``collate_fn`` made comes to the device from pinned memory, in few copies."""

from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.device.collated import ValueLoad
from minato_gpu.device.copies import MOST
from minato_gpu.device.staging import Download, Upload
from tests.device.bench import ORDERS, bench
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice
from tests.support.fake_work import Copy


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


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding is."""


class Named(dict[str, Any]):
    def __init__(self, items: Any, name: str) -> None:
        super().__init__(items)
        self.name = name


class Fixed(dict[str, Any]):
    """As transformers' ModelOutput is, or more so."""

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("not to be changed")

    def __setitem__(self, *_: Any) -> None:
        raise RuntimeError("not to be changed")


Pair = namedtuple("Pair", "x y")

CONTAINERS: dict[str, Callable[[], Any]] = {
    "UserDict": lambda: Encoding(x=torch.ones(3), y="x"),
    "defaultdict": lambda: defaultdict(list, x=torch.ones(3), y="x"),
    "subclass of dict": lambda: Named({"x": torch.ones(3), "y": "x"}, "a"),
    "dict that refuses changes": lambda: Fixed(x=torch.ones(3), y="x"),
    "named tuple": lambda: Pair(torch.ones(3), "x"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_of_any_class_come_to_the_device(kind: str) -> None:
    """They are the same but for their tensors."""
    given = CONTAINERS[kind]()
    with bench(FakeDevice()) as one:
        load = ValueLoad(lambda: {"batch": [given]}, 48)
        one.submit(load)
        batch = one.take(load)["batch"][0]
        assert type(batch) is type(given) and len(batch) == 2
        first, second = ("x", "y") if isinstance(given, Mapping) else (0, 1)
        assert one.device.owns(batch[first]) and batch[second] == "x"
        assert getattr(batch, "name", None) == getattr(given, "name", None)
        assert getattr(batch, "default_factory", None) is getattr(given, "default_factory", None)
        one.device.finish()
        assert batch[first].tolist() == [1, 1, 1]
        assert not one.device.owns(given[first]), "what was given has not changed"


# --- values that travel through pinned memory together, and whoever sends them does not wait --------------------

VALUES: list[Any] = [
    np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::-1],
    np.array(True),
    np.zeros((0, 3), np.int64),
    np.arange(5, dtype=np.int16),
    np.array(7.0),
]


def alike(got: Any, wanted: Any) -> bool:
    return got.shape == wanted.shape and np.array_equal(got, wanted)


@pytest.mark.parametrize("order", [LAZY_COPIES, LAZY_CONSUMER, 3])
def test_there_and_back(order: Any) -> None:
    device = FakeDevice(order)
    with device.running(device.stream()):
        values = [value.copy() for value in VALUES]
        tensors = Upload(device).bring(values)
        for value in values:
            value.fill(0)  # they may change at once
        assert [tensor.numpy().dtype for tensor in tensors] == [value.dtype for value in VALUES]
        download = Download(device, tensors)
        event = device.event()
        del tensors
        event.synchronize()
        arrays = download.arrays()
    assert all(map(alike, arrays, VALUES)) and [one.dtype for one in arrays] == [one.dtype for one in VALUES]
    assert all(one.base is None for one in arrays), "the pinned memory is free"
    assert device.used == 0


def test_what_a_sample_brings_is_one_copy_and_nobody_waits_for_it() -> None:
    device = FakeDevice(LAZY_COPIES)
    stream = device.stream()
    with device.running(stream):
        Upload(device).bring(VALUES)
        assert sum(isinstance(work, Copy) for work in stream.work) == 1 and stream.done == 0
    assert device.waited == [], "it comes from pinned memory"


def test_what_a_micro_batch_leaves_is_copied_home_once() -> None:
    device = FakeDevice(LAZY_COPIES)
    stream = device.stream()
    with device.running(stream):
        tensors = [device.empty(12).view(torch.float32).view(3) for _ in range(9)]
        Download(device, tensors)
        copies = [work for work in stream.work if isinstance(work, Copy)]
        assert [len(work.targets) for work in copies] == [9, 1] and stream.done == 0, "laid side by side before"
    assert device.waited == [], "it goes to pinned memory"


@pytest.mark.parametrize("order", [LAZY_COPIES, LAZY_CONSUMER, 3])
def test_a_device_without_room_for_that_copies_them_one_by_one(order: Any) -> None:
    device = FakeDevice(order, capacity=9 * 12)
    with device.running(device.stream()):
        tensors = Upload(device).bring([np.arange(3, dtype=np.int32)] * 6)
        assert device.used > device.capacity // 2
        download = Download(device, [*tensors, *tensors])
        event = device.event()
        event.synchronize()
    assert all(value.tolist() == [0, 1, 2] for value in download.values()) and len(download.values()) == 12


def test_no_more_is_under_way_than_may_be() -> None:
    device = FakeDevice(LAZY_COPIES)
    stream = device.stream()
    with device.running(stream):
        upload = Upload(device, ahead=100)
        for _ in range(2):
            upload.bring([np.zeros(50, np.uint8)])
        assert stream.done == 0
        upload.bring([np.zeros(50, np.uint8)])
        assert stream.done == 1, "the first, and no more"
        upload.bring([np.zeros(1000, np.uint8)])
        assert stream.done == 3, "more than there may be: when it is alone"
