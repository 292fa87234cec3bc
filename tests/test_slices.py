"""A background thread lets others have the interpreter between its steps, at a price that is bounded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from minato_gpu.lanes.device_work import DeviceWork
from minato_gpu.memory.loads import Load
from minato_gpu.memory.values import ValueLoad
from minato_gpu.slices import LENGTH_S, Slices
from tests.lanes.device_bench import bench
from tests.memory.bench import ROWS
from tests.memory.bench import bench as copies
from tests.support.fake_device import LAZY_CONSUMER, FakeDevice

STEP_S = 2e-5


class Clock:
    """Steps of work, and what it costs to come back."""

    def __init__(self, back_s: float) -> None:
        self.now, self.back_s = 0.0, back_s
        self.longest = self.held = 0.0
        self.away = 0.0
        self.slices = Slices(lambda: self.now, self.let_go)

    def let_go(self) -> None:
        self.longest, self.held = max(self.longest, self.held), 0.0
        self.now += self.back_s
        self.away += self.back_s

    def work(self, seconds: float) -> float:
        """How long it has taken."""
        begin = self.now
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self.held += STEP_S
            self.slices.between()
        return self.now - begin


def test_nobody_waits_for_more_than_a_slice() -> None:
    clock = Clock(back_s=5e-6)
    clock.work(0.1)
    assert clock.longest <= LENGTH_S + STEP_S


@pytest.mark.parametrize("back_s", [5e-6, 1e-4, 5e-3])
def test_at_most_half_of_the_time_goes_to_others(back_s: float) -> None:
    """A training loop that computes in Python all the time gives the lock back after five milliseconds."""
    clock = Clock(back_s)
    clock.work(0.001)  # the first time it is not known what it costs
    assert clock.work(1.0) <= 2.0 + 2 * back_s
    assert clock.away > 0


def test_a_thread_that_has_waited_begins_anew() -> None:
    clock = Clock(back_s=1.0)
    clock.now += 10.0
    clock.slices.begin()
    clock.slices.between()
    assert clock.away == 0.0


def test_every_sample_of_a_micro_batch_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read, drawn and checked, computed, written: none of it for all samples in one go."""
    steps: list[str] = []
    fields, begin, then = DeviceWork._fields, Slices.begin, Slices.between

    def anew(self: Slices) -> None:
        steps.append("begin")
        begin(self)

    def between(self: Slices) -> None:
        steps.append("between")
        then(self)

    def read(self: DeviceWork, *sample: Any) -> Any:
        steps.append("read")
        return fields(self, *sample)

    monkeypatch.setattr(Slices, "begin", anew)
    monkeypatch.setattr(Slices, "between", between)
    monkeypatch.setattr(DeviceWork, "_fields", read)
    with bench(FakeDevice()) as one:
        one.send(*range(20, 28), chunk=1)
        assert one.reported(1)
    assert steps[0] == "begin", "until there was a task it has waited"
    reads = [number for number, step in enumerate(steps) if step == "read"]
    assert len(reads) == 8 and all("between" in steps[a:b] for a, b in pairwise(reads))
    assert steps[reads[-1] :].count("between") >= 8 * (2 + 2 + 1), "drawn for two stages, run in two, written"


@pytest.mark.parametrize("kind", ["gathered", "joined"])
def test_rows_that_the_copies_thread_writes_are_steps(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    steps: list[str] = []
    monkeypatch.setattr(Slices, "begin", lambda self: steps.append("begin"))
    monkeypatch.setattr(Slices, "between", lambda self: steps.append("between"))
    with copies(FakeDevice(LAZY_CONSUMER)) as one:
        if kind == "gathered":
            load: Load = one.scattered(3)
            runs = len(one.layout.leaves) * ROWS
        else:
            runs = 20
            load = ValueLoad(lambda: [torch.zeros(n + 1) for n in range(runs)], 48)
            one.submit(load)
        one.take(load)
    assert steps[: 1 + runs] == ["begin", *["between"] * runs]
