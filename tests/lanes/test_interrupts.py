"""A process that is forked hears no Ctrl-C, from its first moment on."""

from __future__ import annotations

import multiprocessing
import os
import signal

from minato_gpu.lanes import interrupts


def _child() -> None:
    os.kill(os.getpid(), signal.SIGINT)  # before anything could be done about it
    interrupts.ignore()
    os.kill(os.getpid(), signal.SIGINT)
    if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        os._exit(3)


def test_a_forked_process_hears_no_interrupt() -> None:
    process = multiprocessing.get_context("fork").Process(target=_child)
    with interrupts.held(process):
        process.start()
    process.join()
    assert process.exitcode == 0
    process.close()


def test_nothing_is_held_for_a_fork_server() -> None:
    process = multiprocessing.get_context("forkserver").Process(target=_child)
    with interrupts.held(process):
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
