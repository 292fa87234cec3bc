"""A process that is started hears no Ctrl-C and no SIGTERM, from its first moment on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest

from minato_gpu.lanes import forking


def _child(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)  # before anything could be done about it
    forking.begin()
    os.kill(os.getpid(), number)
    if number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        os._exit(3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_leaves_them_to_its_parent(method: str, number: signal.Signals) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=_child, args=(number,))
    forking.start(process)
    process.join()
    assert process.exitcode == 0
    process.close()


def _waits() -> None:
    forking.begin()
    signal.pause()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_can_be_terminated_by_the_programs_own_clean_up(method: str) -> None:
    """Which waits for it then."""
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=_waits)
    forking.start(process)
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    process.close()


def _starts_others() -> None:
    forking.begin()
    forked = os.fork()
    if not forked:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(4)
    codes = [os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])]
    with subprocess.Popen(["sleep", "1000"]) as program:
        program.terminate()
        codes.append(program.wait())
    os._exit(0 if codes == [-signal.SIGTERM] * 2 else 5)


def test_what_a_worker_starts_can_be_terminated() -> None:
    process = multiprocessing.get_context("fork").Process(target=_starts_others)
    forking.start(process)
    process.join()
    assert process.exitcode == 0
    process.close()


def test_nothing_is_held_for_a_fork_server() -> None:
    masks: list[set[Any]] = []

    class Noted(ForkServerProcess):
        def start(self) -> None:
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    forking.start(Noted(target=_child, args=(signal.SIGINT,)))
    assert [signal.SIGINT in mask for mask in masks] == [False]
