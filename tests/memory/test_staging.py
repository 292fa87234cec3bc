"""Values travel through pinned memory, together, and whoever sends them does not wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.memory.staging import ALIGN, Download, Upload, side_by_side
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice
from tests.support.fake_work import Copy

VALUES: list[Any] = [
    np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::-1],
    np.array(True),
    np.zeros((0, 3), np.int64),
    np.arange(5, dtype=np.int16),
    np.array(7.0),
]


def same(got: Any, wanted: Any) -> bool:
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
    assert all(map(same, arrays, VALUES)) and [one.dtype for one in arrays] == [one.dtype for one in VALUES]
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


def test_elements_that_torch_does_not_have() -> None:
    with pytest.raises(TypeError):
        Upload(FakeDevice()).bring([np.array(["a"])])


def test_places_do_not_overlap() -> None:
    assert side_by_side([3, ALIGN, 0, 1]) == ([0, ALIGN, 2 * ALIGN, 2 * ALIGN], 2 * ALIGN + 1)
    assert side_by_side([]) == ([], 0)
