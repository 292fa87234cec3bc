"""A process that is started hears no Ctrl-C and no SIGTERM, from its first moment on, and leaves its parent's garbage
alone."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from minato_gpu import DataLoader
from minato_gpu.lanes import forking
from tests.lanes.lanes import FORK
from tests.support.numbers import LENGTH


def _child(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)  # before anything could be done about it
    forking.begin()
    os.kill(os.getpid(), number)
    if number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        os._exit(3)


@pytest.mark.parametrize(("method", "number"), [("fork", signal.SIGINT), ("spawn", signal.SIGTERM)])
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


def test_it_can_be_terminated_by_the_programs_own_clean_up() -> None:
    """Which waits for it then."""
    process = FORK.Process(target=_waits)
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
    process = FORK.Process(target=_starts_others)
    forking.start(process)
    process.join()
    assert process.exitcode == 0
    process.close()


_COLLECTS_SOON: list[Any] = []  # not empty: a process that was just forked would collect now, if ever


def _after_fork() -> None:
    if _COLLECTS_SOON:
        gc.set_threshold(10)
        _COLLECTS_SOON.extend([] for _ in range(1000))


os.register_at_fork(after_in_child=_after_fork)


class Dropped:
    """A cycle that says where it is finalised."""

    def __init__(self, elsewhere: Any) -> None:
        self.me, self._pid, self._elsewhere = self, os.getpid(), elsewhere

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            self._elsewhere.value += 1


@pytest.fixture
def threshold() -> Iterator[None]:
    """The garbage of a test is still there when it forks."""
    before = gc.get_threshold()
    gc.set_threshold(10_000_000)
    _COLLECTS_SOON.append(None)
    yield
    _COLLECTS_SOON.clear()
    gc.set_threshold(*before)
    gc.enable()


class Collects:
    """Whether the process that prepares a sample collects garbage."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, key: int) -> int:
        return int(gc.isenabled())


@pytest.mark.usefixtures("threshold")
@pytest.mark.parametrize(("on_worker_death", "enabled"), [("raise", False), ("replace", True)])
def test_garbage_is_left_to_the_process_that_made_it(on_worker_death: Any, enabled: bool) -> None:
    elsewhere = FORK.Value("i", 0, lock=False)
    if not enabled:
        gc.disable()
    Dropped(elsewhere)
    dataset: Any = Collects()
    loader = DataLoader(dataset, 4, num_workers=2, multiprocessing_context="fork", on_worker_death=on_worker_death)
    found = {int(each) for batch in loader for each in batch}
    assert elsewhere.value == 0
    assert found == {int(enabled)}, "workers collect their own garbage as their parent does"
    assert gc.isenabled() == enabled
