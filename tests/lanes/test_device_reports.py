"""When the device lane reports a task: as soon as the device is through with it, whatever the host is at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from minato_gpu.lanes.device import DeviceExecutor
from tests.lanes.device_bench import Bench, add, bench, double, pipeline
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice

FIRST, BUSY, LONG = 20, 30, 31


class Gates:
    """What the device does with sample FIRST waits until a second task is there, and what it does with LONG until the
    test lets it; ``busy`` is done with sample BUSY, on the device and then, where that raised, on the CPU."""

    def __init__(self, busy: Callable[[], None] = lambda: None) -> None:
        self.begun, self.sent, self.seen = threading.Event(), threading.Event(), threading.Event()
        self.busy = busy

    def on_device(self, fields: Any, params: Any) -> Any:
        """The stage "add" there."""
        number = int(fields["x"][0])
        if number == FIRST:
            self.begun.set()
            assert self.sent.wait(20)
        if number == BUSY:
            self.busy()
        if number == LONG:
            assert self.seen.wait(20)
        return add(fields, params)

    def then(self, xp: Any, fields: Any, params: Any) -> Any:
        """The stage "double" there."""
        if int(fields["x"][0]) == LONG + 1:
            assert self.seen.wait(20)
        return double(fields, params)

    def on_cpu(self, fields: Any, params: Any) -> Any:
        """The stage "add" on the CPU."""
        if int(fields["x"][0]) == BUSY:
            assert self.seen.wait(20)
        return add(fields, params)

    def run(self, one: Bench, second: Callable[[], Any]) -> bool:
        """Whether the first task is reported while the second, which is sent as soon as it has begun, is at LONG."""
        one.send(FIRST, chunk=1)
        assert self.begun.wait(20)
        second()
        self.sent.set()
        found = one.reported(1, 5.0)
        assert one.report(2) is None
        self.seen.set()
        assert one.reported(2)
        return found


def test_what_the_device_is_through_with_is_reported_before_the_next_is_begun() -> None:
    gates = Gates()
    with bench(FakeDevice(LAZY_CONSUMER), pipeline(gates.on_device)) as one:
        assert gates.run(one, lambda: one.send(LONG, chunk=2))


def test_it_is_reported_between_two_parts_of_the_next() -> None:
    """The device is through with it while the first part is issued, and the second one takes long."""
    device = FakeDevice(LAZY_COPIES)
    gates = Gates(device.finish)
    with bench(device, pipeline(gates.on_device, gates.then)) as one:
        assert gates.run(one, lambda: one.send(BUSY, LONG, cut=(LONG,), chunk=2))


def test_it_is_reported_before_a_sample_of_the_next_is_repeated_on_the_cpu() -> None:
    device = FakeDevice(LAZY_COPIES)

    def fail() -> None:
        device.finish()
        raise ValueError("not on this device")

    gates = Gates(fail)
    with bench(device, pipeline(gates.on_device, cpu=gates.on_cpu)) as one:
        assert gates.run(one, lambda: one.send(BUSY, chunk=2))
        report = one.report(2)
        assert report is not None and report.repeated == 1


def test_it_is_reported_between_two_samples_of_the_next() -> None:
    device = FakeDevice(LAZY_COPIES)
    gates = Gates(device.finish)
    with bench(device, pipeline(gates.on_device)) as one:
        assert gates.run(one, lambda: one.send(BUSY, LONG, chunk=2))


def test_it_is_waited_for_before_a_graph_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceExecutor, "built", False)
    gates = Gates()
    with bench(FakeDevice(LAZY_COPIES), pipeline(gates.on_device)) as one:
        assert gates.run(one, lambda: one.send(LONG, chunk=2))
