"""A process that is forked hears no Ctrl-C, from its first moment on."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.context import ForkServerProcess
from typing import Any

from minato_gpu.lanes import forking


def _child() -> None:
    os.kill(os.getpid(), signal.SIGINT)  # before anything could be done about it
    forking.begin()
    os.kill(os.getpid(), signal.SIGINT)
    if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        os._exit(3)


def test_a_forked_process_hears_no_interrupt() -> None:
    process = multiprocessing.get_context("fork").Process(target=_child)
    forking.start(process)
    process.join()
    assert process.exitcode == 0
    process.close()


def test_nothing_is_held_for_a_fork_server() -> None:
    masks: list[set[Any]] = []

    class Noted(ForkServerProcess):
        def start(self) -> None:
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    forking.start(Noted(target=_child))
    assert [signal.SIGINT in mask for mask in masks] == [False]
