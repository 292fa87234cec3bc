"""The fake device's own checks, on which the tests of every lane and load rely, and the stand-in for CUDA."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fake_device import CANARY, LAZY_CONSUMER, LAZY_COPIES, FakeDevice, Foreign

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("use", ["event", "empty", "copy"])
def test_the_fake_device_keeps_its_consumers_stream_from_the_loaders_threads(use: str) -> None:
    device, caught = FakeDevice(), list[BaseException]()
    acts: dict[str, Callable[[], Any]] = {
        "event": device.event,
        "empty": lambda: device.empty(8),
        "copy": lambda: device.copy(torch.zeros(2), torch.ones(2)),
    }

    def act() -> None:
        try:
            acts[use]()
        except AssertionError as error:
            caught.append(error)

    for name in ("minato-device", "somebody"):
        thread = threading.Thread(target=act, name=name)
        thread.start()
        thread.join()
    assert len(caught) == 1


def on(device: FakeDevice) -> Any:
    """A stream of its own, on which the test issues."""
    return device.running(device.stream())


def test_a_copy_may_be_half_finished_when_other_work_runs() -> None:
    device = FakeDevice(LAZY_COPIES)
    with on(device):
        target = device.empty(8)
        device.copy(target, torch.arange(8, dtype=torch.uint8))
        device._step(device.current)
        assert target.tolist() == [0, 1, 2, 3, *[CANARY] * 4]
        assert not device.event().query()
    device.finish()
    assert target.tolist() == list(range(8))


def test_memory_of_other_libraries_is_not_copied_and_is_used_again_at_once() -> None:
    """Also where the consumer was recorded as its user: PyTorch's allocator has no say in it."""
    device, seen = FakeDevice(LAZY_CONSUMER), list[Any]()
    with on(device):
        kept, dropped = (device.adopt(Foreign(device, np.full(4, 7, np.float32))) for _ in range(2))
    for tensor in (kept, dropped):
        device.used_here(tensor)
        device.read(tensor, lambda memory: seen.append(memory.tolist()))
    del dropped, tensor
    device.finish()
    assert seen[0] == [7.0] * 4 != seen[1]
    assert device.used == 0


def test_who_waits_for_the_device_is_told_and_who_finds_it_done_is_not() -> None:
    device = FakeDevice(LAZY_COPIES)
    with on(device):
        target = device.empty(4)
        device.copy(target, device.host(4))
        event = device.event()
    assert not event.query() and device.waited == []
    event.synchronize()
    event.synchronize()
    name = threading.current_thread().name
    assert device.waited == [(name, "an event")]
    device.fetch(target, event)
    assert device.waited[1:] == [(name, "a copy to the host")]


def test_a_copy_waits_unless_memory_is_pinned() -> None:
    device, array = FakeDevice(), np.zeros(4, np.uint8)
    with on(device):
        target, pageable = device.empty(4), torch.from_numpy(array)
        for source in (device.host(4), device.empty(4), pageable[:0]):
            device.copy(target[: len(source)], source)
        assert device.waited == []
        device.copy(pageable, target)
        device.copy(target, pageable)
        assert len(device.waited) == 2
        device.pin(array.ctypes.data, array.nbytes)
        device.copy(target, pageable)
    assert len(device.waited) == 2
    device.finish()
    device.unpin(array.ctypes.data)
    assert device.pinned == {}, "memory that was taken pinned is free again"


def test_each_thread_has_a_current_device_on_which_other_libraries_make_what_they_make() -> None:
    first = FakeDevice()
    second = FakeDevice(beside=[first])
    with on(second):
        made = Foreign(second, np.zeros(4))
        second.adopt(made)
        elsewhere: list[Foreign] = []
        thread = threading.Thread(target=lambda: elsewhere.append(Foreign(second, np.zeros(4))))
        thread.start()
        thread.join()
        assert (made.device, elsewhere[0].device) == (second, first)
        with pytest.raises(AssertionError, match="made on another device"):
            second.adopt(elsewhere[0])
    assert first.current_device == 0


@pytest.mark.parametrize("call", ["synchronize", "query", "event", "empty", "copy", "fetch"])
def test_an_error_comes_late_and_with_whatever_is_called_next(call: str) -> None:
    device = FakeDevice(LAZY_COPIES)
    with on(device):
        target = device.empty(4)
        device.fail(RuntimeError("an illegal memory access was encountered"))
        event = device.event()
        acts: dict[str, Callable[[], Any]] = {
            "synchronize": event.synchronize,
            "query": event.query,
            "event": device.event,
            "empty": lambda: device.empty(8),
            "copy": lambda: device.copy(target, target),
            "fetch": lambda: device.fetch(target, event),
        }
        if call not in ("synchronize", "fetch"):
            acts[call]()  # nobody has noticed
            device.finish()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="illegal memory access"):
                acts[call]()


def test_what_pools_do_not_use_is_free_again_when_they_are_asked() -> None:
    device = FakeDevice(capacity=100)
    device.pooled = 50
    with on(device):
        with pytest.raises(torch.OutOfMemoryError):
            device.empty(60)
        device.trim()
        assert device.empty(60).numel() == 60 and device.trims == 1


# --- the stand-in for CUDA, as far as it needs no build of PyTorch for CUDA; make rehearse tests the rest -------------


def test_a_rehearsal_without_pytorch_for_cuda_says_so_and_stops(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"  # of the environment; its pip finds nothing
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'ERROR: first' >&2; echo 'ERROR: no network' >&2; exit 1\n", encoding="ascii")
    python.chmod(0o755)
    given = ["make", "rehearse", f"REHEARSAL={tmp_path}", f"PYTHON_REHEARSAL={sys.executable}"]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode and len(said) == 1 and said[0].startswith("no rehearsal: "), done.stderr
    if (sys.platform, sys.version_info[:2]) == ("linux", (3, 11)) and shutil.which("g++"):  # else it says so
        assert "torch==2.11.0 for CUDA" in said[0] and said[0].endswith(": ERROR: no network")
    assert not (tmp_path / ".installed").exists()
