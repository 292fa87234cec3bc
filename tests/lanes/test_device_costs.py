"""What samples are said to have cost on a device: each what its own part took there."""

from __future__ import annotations

from typing import Any

import pytest

from minato_gpu.lanes import cpu_time, device_work
from minato_gpu.lanes.store import Store
from tests.lanes import device_bench
from tests.lanes.device_bench import bench, pipeline, short_beyond
from tests.support.fake_device import LAZY_COPIES, FakeDevice

BUSY_S = 4e-3


class _Clock:
    """What the lane's thread has run for, and what the host's clock says: only stages take any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(cpu_time, "thread_time", lambda: self.now)
        monkeypatch.setattr(device_work, "perf_counter", lambda: self.now)

    def work(self) -> None:
        """A stage of one sample."""
        self.now += BUSY_S


def test_every_split_point_has_the_cost_of_its_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in works while a part is issued: each costs its own seconds of the cores."""
    clock = _Clock(monkeypatch)

    def add(fields: Any, params: Any) -> Any:
        clock.work()
        return device_bench.add(fields, params)

    def double(xp: Any, fields: Any, params: Any) -> Any:
        clock.work()
        return device_bench.double(fields, params)

    with bench(FakeDevice(LAZY_COPIES), pipeline(add, double)) as one:
        for chunk in (1, 2, 3):
            one.send(20, 21, 22, cut=(21,), chunk=chunk)
        for chunk in (1, 2, 3):
            assert one.reported(chunk)
            report = one.report(chunk)
            assert report is not None and report.times is not None
            assert report.parts == [(split, (each,)) for split, each in zip((1, 2, 1), report.times, strict=True)]
            assert report.times == pytest.approx([2 * BUSY_S, BUSY_S, 2 * BUSY_S])


class _Timed(FakeDevice):
    """Every piece of its work takes a second: one for each sample."""

    keeps_time = True


def test_a_device_that_keeps_time_says_what_samples_cost() -> None:
    """From the end of the part before, whenever the host issued them and comes to ask."""
    with bench(_Timed(LAZY_COPIES)) as one:
        for chunk in (1, 2, 3):
            one.send(20, 21, 22, 23, cut=(21, 23), chunk=chunk)
        for chunk in (1, 2, 3):
            assert one.reported(chunk)
            report = one.report(chunk)
            assert report is not None and report.times == [1.0] * 4 and report.seconds == 4.0


def test_what_could_not_be_read_takes_no_share_of_what_the_others_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    get = Store.get

    def refuse(self: Store, item: Any) -> Any:
        fields = get(self, item)
        if fields["label"] == 22:
            raise RuntimeError("cannot be read here")
        return fields

    monkeypatch.setattr(Store, "get", refuse)
    with bench(_Timed(LAZY_COPIES)) as one:
        one.send(20, 21, 22, 23, cut=(21,), chunk=1)
        assert one.reported(1)
        report = one.report(1)
        assert report is not None and report.times == [1.0, 1.0, 0.0, 1.0]


def test_a_micro_batch_that_was_halved_for_want_of_memory_is_not_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    short_beyond(monkeypatch, 2)
    with bench(_Timed(LAZY_COPIES)) as one:
        for chunk in (1, 2):
            one.send(20, 21, 22, chunk=chunk)
            assert one.reported(chunk)
        first, second = one.report(1), one.report(2)
        assert first is not None and first.times is None
        assert second is not None and second.times is not None
