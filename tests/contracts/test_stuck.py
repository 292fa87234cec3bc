"""A worker that takes too long is reported with what it is at."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
from typing import Any

import psutil
import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.lanes import stacks
from tests.contracts.datasets import Made
from tests.support.raising import error_of
from tests.support.waiting import wait_until

_FORK = multiprocessing.get_context("fork")


def _loader(gate: Any, kind: str, begun: Any = None, **more: Any) -> Any:
    def stuck_in_here(index: int) -> Any:
        if begun is not None:
            begun[index] = 1
        if index == 2:
            gate.wait()
        return torch.tensor(index)

    return DataLoader(Made(8, stuck_in_here), 2, num_workers=2, worker_kind=kind, timeout=1.5, **more)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_the_stack_of_the_stuck_sample(kind: str) -> None:
    gate, begun = _FORK.Event(), _FORK.RawArray("b", 8)
    iterator = iter(_loader(gate, kind, begun))
    # the first batch is there when it is asked for, and one worker is stuck: 3 may be behind it
    assert wait_until(lambda: all(begun[index] for index in range(8) if index != 3))
    assert next(iterator).tolist() == [0, 1]
    text = str(error_of(RuntimeError, lambda: list(iterator)))
    gate.set()
    assert text.startswith("DataLoader timed out after 1.5 seconds\nWorker ")
    assert "stuck_in_here" in text and "test_stuck.py" in text


def test_a_worker_that_does_not_come_to_take_work() -> None:
    gate, begun = _FORK.Event(), _FORK.RawArray("b", 2)

    def never_starts(worker: int) -> None:
        begun[worker] = 1
        gate.wait()

    iterator = iter(_loader(gate, "process", worker_init_fn=never_starts))
    assert wait_until(lambda: all(begun))
    text = str(error_of(RuntimeError, next, iterator))
    gate.set()
    assert "Worker 0 is at:" in text and "Worker 1 is at:" in text and "never_starts" in text


def test_a_process_that_does_not_listen_yet_is_not_killed() -> None:
    """A worker that is still starting would die of the signal."""
    process = subprocess.Popen(["sleep", "60"])
    ours, theirs = socket.socketpair()
    try:
        assert stacks.of_process(process.pid, ours) == ""
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


_could_run = stacks._could_run


def _goes_on(pid: int) -> bool:
    """In place of ``_could_run``: what was stopped, instead of having no core, goes on."""
    if psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        return _could_run(pid)
    os.kill(pid, signal.SIGCONT)
    return True


def test_a_worker_that_has_no_core_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for as long as it could run; what stands in for that is that it was stopped, and goes on."""
    ours, theirs = socket.socketpair()
    gate = _FORK.Event()

    def stuck_in_here() -> None:
        stacks.offer(theirs)
        os.kill(os.getpid(), signal.SIGSTOP)
        gate.wait()

    process = _FORK.Process(target=stuck_in_here)
    process.start()
    assert process.pid is not None
    os.waitpid(process.pid, os.WUNTRACED)
    monkeypatch.setattr(stacks, "_could_run", _goes_on)
    assert "stuck_in_here" in stacks.of_process(process.pid, ours)
    gate.set()
    process.join()
    ours.close()
    theirs.close()


def test_a_worker_that_loses_its_core_while_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is waited for; here it stops in the middle of its answer, and goes on when it is looked at."""
    ours, theirs = socket.socketpair()
    gate, listens = _FORK.Event(), _FORK.Event()

    def answer(number: int, frame: Any) -> None:
        theirs.send(b"the beginning")
        os.kill(os.getpid(), signal.SIGSTOP)
        theirs.send(b" and the end")

    def waits() -> None:
        signal.signal(stacks.SIGNAL, answer)
        listens.set()
        gate.wait()

    process = _FORK.Process(target=waits)
    process.start()
    assert process.pid is not None and listens.wait(20)
    monkeypatch.setattr(stacks, "_could_run", _goes_on)
    try:
        assert stacks.of_process(process.pid, ours) == "the beginning and the end"
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()
