"""What a device's errors do to the threads that use it: they are told, and nobody waits for a thread that has ended."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.device import work as device_work
from minato_gpu.device.functions import FunctionSegment
from minato_gpu.device.output import DeviceOutput
from minato_gpu.device.work import DeviceWork
from tests.support.device_batches import Fake, check_same, consume, fake, reference, seeded
from tests.support.fake_device import LAZY_COPIES, FakeDevice, FakeEvent
from tests.support.numbers import BATCH, COSTLY, LENGTH, PIPELINE, Numbers

__all__ = ["fake"]

ERROR = "an illegal memory access was encountered"


def loader_on(lanes: Any, **more: Any) -> Any:
    more["pipeline"] = PIPELINE if lanes == ["device"] else COSTLY
    return DataLoader(Numbers(), BATCH, num_workers=2, device="cuda", lanes=lanes, timeout=60, **more)


def numbers(device: FakeDevice, loader: Any) -> list[int]:
    return [int(n) for _, labels in consume([device], loader) for n in labels]


def fails_once(
    monkeypatch: pytest.MonkeyPatch, of: Any, name: str, thread: str, at: int, error: type[Exception] = RuntimeError
) -> threading.Event:
    """The ``at``-th call in this thread raises. Set once it has."""
    before, count, raised = getattr(of, name), [0], threading.Event()

    def once(*args: Any, **more: Any) -> Any:
        if threading.current_thread().name == thread:
            count[0] += 1
            if count[0] == at:
                raised.set()
                raise error(ERROR)
        return before(*args, **more)

    monkeypatch.setattr(of, name, once)
    return raised


def first_question_fails(monkeypatch: pytest.MonkeyPatch, thread: str) -> threading.Event:
    """The first event that this thread asks raises. Set once it has: until then others are told that none has come to
    pass, for what they find passed is not asked by this thread any more."""
    query = FakeEvent.query
    raised = fails_once(monkeypatch, FakeEvent, "query", thread, 1)
    fails = FakeEvent.query

    def ask(event: FakeEvent) -> bool:
        own = threading.current_thread().name == thread
        return fails(event) if own else raised.is_set() and query(event)

    monkeypatch.setattr(FakeEvent, "query", ask)
    return raised


@pytest.mark.usefixtures("open_from_the_start")
@pytest.mark.parametrize("lanes", [["device"], ["cpu", "device"]], ids="+".join)
@pytest.mark.parametrize("thread", ["minato-device", "minato-copies"])
def test_an_event_that_cannot_be_asked_stops_nothing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, thread: str, lanes: list[str]
) -> None:
    """CUDA reports what kernels did wrong earlier there: whoever waits for the event, or issues more, says so."""
    device = fake(LAZY_COPIES)
    raised = first_question_fails(monkeypatch, thread)
    loader = loader_on(lanes)
    assert numbers(device, loader) == list(range(LENGTH))
    assert raised.is_set() and not loader.stats()["device_lane"]["retired"]
    gc.collect()
    assert device.used == 0 and device.pinned == {}


@pytest.mark.parametrize(
    ("of", "name", "at", "error"),
    [
        (FakeDevice, "stream", 1, RuntimeError),
        (FakeDevice, "adopt", 9, BufferError),
        (FakeDevice, "host", 9, torch.OutOfMemoryError),
        (FakeEvent, "synchronize", 3, RuntimeError),
    ],
)
def test_samples_that_the_device_has_failed_are_tried_again(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, of: Any, name: str, at: int, error: type[Exception]
) -> None:
    """None of them is bad: whichever of the device's operations raised was theirs together, or its own."""
    device = fake(LAZY_COPIES)
    raised = fails_once(monkeypatch, of, name, "minato-device", at, error)
    loader = loader_on(["device"], device_memory_budget=1 if name == "host" else None, generator=seeded())
    wanted = reference(Numbers(), pipeline=PIPELINE, lanes=["cpu"], generator=seeded())
    check_same(consume([device], loader), wanted)
    repeated = loader.stats()["samples_repeated"]
    assert raised.is_set()
    if name == "host":  # pools are trimmed, and there is memory for all of them
        assert repeated == 0 and loader.stats()["device_lane"]["short_of_memory"] == 1
    else:
        assert repeated == 1 if name == "adopt" else repeated > 0


@pytest.mark.usefixtures("open_from_the_start")
def test_others_do_what_it_has_begun(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = fake(LAZY_COPIES)
    raised = fails_once(monkeypatch, DeviceWork, "_find_threads", "minato-device", 2)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        loader = loader_on(["cpu", "device"])
        assert numbers(device, loader) == list(range(LENGTH))
    assert raised.is_set() and loader.stats()["device_lane"]["retired"]
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "the device lane has broken down; the CPU lane goes on alone"
    ]
    gc.collect()
    assert device.used == 0


@pytest.mark.usefixtures("open_from_the_start")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lanes", [["device"], ["cpu", "device"]], ids="+".join)
def test_a_device_that_fails_whatever_it_is_given_is_given_nothing_more(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lanes: list[str], late: bool
) -> None:
    """Be it as a stage raises, or as its work is waited for. Without another lane it goes on, and says so as well."""
    device = fake(LAZY_COPIES)

    def fails(*_: Any) -> Any:
        raise RuntimeError("nvImageCodec failure: '#8'")

    if late:
        monkeypatch.setattr(DeviceOutput, "settle", fails)
    else:
        monkeypatch.setattr(FunctionSegment, "run", fails)
    monkeypatch.setattr(device_work, "_USELESS_LIMIT", 3)
    wanted = reference(Numbers(), pipeline=PIPELINE, lanes=["cpu"], generator=seeded())
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        loader = loader_on(lanes, generator=seeded())
        check_same(consume([device], loader), wanted)
    stats = loader.stats()
    assert stats["device_lane"]["retired"] is (len(lanes) > 1)
    (record,) = caplog.records
    assert record.message.startswith("the device lane fails every sample that it is given")
    assert "nvImageCodec failure: '#8'" in record.message
    if len(lanes) > 1:
        assert 0 < stats["samples_repeated"] < LENGTH // 2
    else:
        assert stats["samples_repeated"] == LENGTH
