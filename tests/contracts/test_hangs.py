"""Workers that hang are reported with their stack and stage, and replaced where they can be; so are those for which a
batch is late (``timeout``)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

from minato_gpu import DataLoader, Field, Pipeline, Stage
from minato_gpu.faults.watchdog import Hung, Watchdog, WorkerHung
from minato_gpu.lanes import stacks
from minato_gpu.lanes.contract import AtWork
from minato_gpu.pipeline.pipeline import TorchFunction
from tests.contracts.datasets import Made
from tests.support.raising import error_of
from tests.support.waiting import wait_until

_FORK = multiprocessing.get_context("fork")
_LOOK = Watchdog.look
_DEVICE = -1  # in place of a worker's number
_ages = _FORK.RawArray("b", 3)  # for which workers time passes, and the device lane


@pytest.fixture(autouse=True)
def _time_passes_for_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a gate is at its sample for as long as the clock says, until it is found to hang. All others have
    just begun whenever they are looked at: one that has no core for half a second does not hang."""
    _ages[:] = [0] * len(_ages)

    def looked(watchdog: Watchdog, now: float, told: Mapping[str, Sequence[AtWork]]) -> list[Hung]:
        at_work = {
            lane: [each if _ages[_number(lane, each.worker)] else replace(each, since=now) for each in all_of_it]
            for lane, all_of_it in told.items()
        }
        found = _LOOK(watchdog, now, at_work)
        for hung in found:
            _ages[_number(hung.lane, hung.worker)] = 0
        return found

    monkeypatch.setattr(Watchdog, "look", looked)


def _number(lane: str, worker: int) -> int:
    return worker if lane == "cpu" else _DEVICE


def _own_number() -> int:
    """Of the worker, a process or a thread, that prepares the sample."""
    info = get_worker_info()
    return int(threading.current_thread().name.rpartition("-")[2]) if info is None else info.id


class _Gate:
    """One key waits for a gate. ``begun``: which keys were asked for."""

    def __init__(self, at: int) -> None:
        self.at, self.event, self.begun = at, _FORK.Event(), _FORK.RawArray("b", 8)

    def stuck_in_here(self, key: int) -> Any:
        self.begun[key] = 1
        if key == self.at:
            _ages[_own_number()] = 1
            self.event.wait()
        return torch.tensor(key)

    def loader(self, **more: Any) -> Any:
        """Four batches, by two workers."""
        return DataLoader(Made(8, self.stuck_in_here), 2, num_workers=2, **more)


@pytest.mark.parametrize("arguments", [{"on_worker_death": "raise"}, {"worker_kind": "thread"}], ids=str)
def test_what_is_not_replaced_is_an_error(arguments: dict[str, Any]) -> None:
    gate = _Gate(5)
    loader = gate.loader(**{"on_worker_death": "replace", "hang_timeout": 0.4, **arguments})
    iterator = iter(loader)
    text = str(error_of(WorkerHung, lambda: list(iterator)))
    gate.event.set()
    assert loader.stats()["workers"] == {"died": 0, "hung": 1, "replaced": 0}
    assert "has hung" in text and "stuck_in_here" in text and "It was not replaced" in text


class _Stuck:
    """A device function that waits, in a thread of this process, for a gate; the CPU's does not."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.gate = threading.Event()
        self.begun = 0

    def waits_in_here(self, x: float) -> None:
        self.begun += 1
        if x == self.at:
            _ages[_DEVICE] = 1
            self.gate.wait()

    def pipeline(self, *, fails: bool = False) -> Pipeline:
        """Two stages, the second of which waits; with ``fails`` its CPU implementation, after the device's failed."""

        def first(fields: Any, _: Any) -> Any:
            return {"y": np.float32(fields["x"])}

        def waits(reads: Any, _: Any) -> Any:
            if fails and reads["y"] == self.at:
                raise ValueError("not on this device")
            self.waits_in_here(float(reads["y"]))
            return {"z": reads["y"] + 1}

        def on_cpu(fields: Any, _: Any) -> Any:
            self.waits_in_here(float(fields["y"]))
            return {"z": np.float32(fields["y"] + 1)}

        field = Field(np.float32, ())
        stages = (
            Stage("first", reads=("x",), writes={"y": field}, cpu=first),
            Stage("waits", reads=("y",), writes={"z": field}, cpu=on_cpu, device=TorchFunction(waits)),
        )
        return Pipeline(stages, outputs=("z",))

    def loader(self, *, fails: bool = False, **more: Any) -> Any:
        """On the device lane alone."""
        arguments: dict[str, Any] = {"pipeline": self.pipeline(fails=fails), "hang_timeout": 0.4, **more}
        return DataLoader(Made(16, lambda key: {"x": key}), 4, num_workers=1, lanes=("device",), **arguments)


@pytest.mark.parametrize("fails", [False, True], ids=["on the device", "when tried on the CPU"])
@pytest.mark.parametrize("death", ["raise", "replace"])
def test_a_device_lane_that_hangs_is_an_error(death: str, fails: bool) -> None:
    """Its thread cannot be ended: the stack and the stage are told, and once it returns the epoch goes on."""
    stuck = _Stuck(9)
    iterator = iter(stuck.loader(fails=fails, on_worker_death=death))
    got = [next(iterator)["z"].tolist() for _ in range(2)]
    text = str(error_of(WorkerHung, lambda: next(iterator)))
    assert "device lane" in text and "has hung: it has been at one sample" in text
    assert "epoch 0, position 9, index 9, stage 'waits', lane device" in text
    assert "waits_in_here" in text and "It was not ended" in text and "hang_timeout=0.4 s" in text
    stuck.gate.set()
    got += [batch["z"].tolist() for batch in iterator]
    assert got == [[4 * n + 1.0 + k for k in range(4)] for n in range(4)]


def test_leaving_a_device_lane_that_hangs_does_not_hang() -> None:
    stuck = _Stuck(0)
    iterator = iter(stuck.loader())
    error_of(WorkerHung, lambda: next(iterator))
    engine = iterator._engine
    with pytest.warns(RuntimeWarning, match="device lane still hangs 0.01 s after its loader was closed"):
        engine.close(0.01)
    stuck.gate.set()
    lane = engine.pump.lanes["device"]
    assert wait_until(lambda: not lane._thread.is_alive())
    assert lane.close(0.0)
    engine.pump.lanes["cpu"].close(0.0)
    engine._links.close()


# --- a batch that does not come in time --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_the_stack_of_the_stuck_sample(kind: str) -> None:
    gate = _Gate(2)
    iterator = iter(gate.loader(worker_kind=kind, timeout=1.5))
    # the first batch is there when it is asked for, and one worker is stuck: 3 may be behind it
    assert wait_until(lambda: all(gate.begun[index] for index in range(8) if index != 3))
    assert next(iterator).tolist() == [0, 1]
    text = str(error_of(RuntimeError, lambda: list(iterator)))
    gate.event.set()
    assert text.startswith("DataLoader timed out after 1.5 seconds\nWorker ")
    assert "stuck_in_here" in text and "test_hangs.py" in text


def test_a_worker_that_does_not_come_to_take_work() -> None:
    gate = _Gate(2)

    def never_starts(worker: int) -> None:
        gate.begun[worker] = 1
        gate.event.wait()

    iterator = iter(gate.loader(timeout=1.5, worker_init_fn=never_starts))
    assert wait_until(lambda: all(gate.begun[:2]))
    text = str(error_of(RuntimeError, next, iterator))
    gate.event.set()
    assert "Worker 0 is at:" in text and "Worker 1 is at:" in text and "never_starts" in text
    assert "does not answer" not in text, "what one says is not another's"


def test_a_process_that_does_not_listen_yet_is_not_killed() -> None:
    """A worker that is still starting would die of the signal."""
    process = subprocess.Popen(["sleep", "60"])
    ours, theirs = socket.socketpair()
    try:
        assert stacks.Stacks(ours).of_processes([process.pid]) == {process.pid: ""}
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        ours.close()
        theirs.close()


def test_a_worker_that_cannot_answer() -> None:
    """It is stopped: the report says that, and does not wait for it."""
    pid = _FORK.Value("i", 0)

    def stops(index: int) -> Any:
        pid.value = os.getpid()
        os.kill(pid.value, signal.SIGSTOP)
        return torch.tensor(index)

    iterator = iter(DataLoader(Made(2, stops), num_workers=1, timeout=1.5))
    assert wait_until(lambda: pid.value and psutil.Process(pid.value).status() == psutil.STATUS_STOPPED)
    text = str(error_of(RuntimeError, next, iterator))
    assert text.endswith("Worker 0 is at:\n  (it does not answer)")
