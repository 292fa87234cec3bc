"""Worker processes: what they hear and collect as they start, how they end, and that none is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch
import torch.utils.data
from torch.utils.data import default_collate

from minato_gpu import DataLoader
from minato_gpu.lanes import forking
from minato_gpu.lanes.contract import Exit, Opened
from minato_gpu.lanes.processes import Workers
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.spawner import readable
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import KNOWN
from tests.lanes.harness import job, open_links, piece, task
from tests.lanes.lanes import FORK, of_kind, open_lane, reports_of
from tests.support.leaks import child_pids
from tests.support.numbers import LENGTH
from tests.support.waiting import wait_until

_LIBC = ctypes.CDLL(None)
_IN_CREATE = 0x100  # inotify(7)

pytestmark = pytest.mark.usefixtures("no_leaks")


@contextmanager
def started(
    links: WorkerChannels, what: Job, *, context: Any = FORK, forks: bool = True, replaceable: bool = False
) -> Iterator[Workers]:
    """As many as ``what`` says."""
    workers = Workers(context, links, what, what.num_workers, forks=forks, replaceable=replaceable)
    try:
        yield workers
    finally:
        links.close_parent_ends()
        workers.close(2.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_a_worker_that_is_killed_is_reported_with_the_signal(number: signal.Signals) -> None:
    with open_lane(lambda key: key, 2) as lane:
        assert wait_until(lambda: len(lane.pids) == 2)
        pid = lane.pids[1]
        subprocess.run(["kill", f"-{number.value}", str(pid)], check=True)
        [ended] = of_kind(lane, Exit)
        assert (ended.number, ended.pid, ended.code) == (1, pid, -number)
        text = ended.message()
        assert f"(pid {ended.pid}) is killed by signal: {signal.strsignal(number)}. " in text
        assert ("out of memory" in text) == (number is signal.SIGKILL)


def test_a_worker_that_is_being_killed_is_at_work_no_longer() -> None:
    """It takes some time to end: who looks again meanwhile would take it to hang once more."""
    never = FORK.Event()
    with open_lane(lambda key: never.wait()) as lane:
        lane.send(task(piece([0])))
        assert wait_until(lambda: lane.at_work())
        lane.kill(0, "it was here")
        assert not lane.at_work()
        [ended] = of_kind(lane, Exit)
        assert (ended.number, ended.code, ended.hung) == (0, -signal.SIGKILL, "it was here")


def _forks(pid: Any) -> Callable[[int], Any]:
    """Samples that leave a process behind which nobody waits for; key 1 then kills its worker."""

    def make(key: int) -> int:
        child = os.fork()
        if not child:
            signal.pause()
        pid.value = child
        if key == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return key

    return make


@pytest.mark.parametrize("key", [0, 1])
def test_what_a_worker_has_forked_does_not_hide_its_end(key: int) -> None:
    """It holds all that the worker held, the end of the sentinel's pipe too."""
    pid = FORK.Value("i", 0)
    with open_lane(_forks(pid)) as lane:
        try:
            if key:
                lane.send(task(piece([key])))
                assert wait_until(lambda: select.select(lane.fault_fds(), [], [], 0)[0])
                assert of_kind(lane, Exit)[0].code == -signal.SIGKILL
            else:
                reports_of(lane, task(piece([key])))
                lane.close(3600.0)  # until they have left
        finally:
            os.kill(pid.value, signal.SIGKILL)


@pytest.mark.parametrize("forks", [True, False], ids=["forked by the spawner", "started"])
def test_the_dead_leave_no_descriptor_and_no_thread(forks: bool) -> None:
    """However many are replaced."""
    me, what = psutil.Process(), job(lambda key: key, num_workers=2)

    def holds() -> tuple[int, int]:
        return me.num_fds(), me.num_threads()

    with open_links(2) as links, started(links, what, forks=forks, replaceable=True) as workers:
        held = []
        for number in (0, 1, 0, 1, 1, 0):
            workers.kill(number, "it was here")
            assert isinstance(_next_of(workers), Exit)
            workers.replace(number, ())
            assert isinstance(_next_of(workers), Opened)
            held.append(holds())
        # fewer: what earlier tests left was collected; a moment later: the thread that started one is still ending
        back = wait_until(lambda: all(last <= first for first, last in zip(held[1], holds(), strict=True)))
        assert back, f"descriptors, threads: {held}"


@pytest.mark.parametrize(("method", "each"), [("fork", 2), ("forkserver", 3)])
def test_a_worker_takes_few_descriptors(method: str, each: int) -> None:
    """Of this process: arenas and the socket for stacks are shared."""
    held = []
    for count in (1, 1, 4):  # the first starts the fork server
        context, what = multiprocessing.get_context(method), job(range(4), num_workers=count)
        with open_links(count) as links, started(links, what, context=context, forks=method == "fork"):
            held.append(psutil.Process().num_fds())
    assert held[2] - held[1] <= 3 * each


def test_what_the_consumer_keeps_is_all_that_is_left_of_closed_channels() -> None:
    links = WorkerChannels(2, addressed=False, arenas=True)
    kept, other = (links.arenas[1].allocate(1 << 20) for _ in range(2))
    for offset in (kept, other):
        links.arenas[1].buffer[offset : offset + (1 << 20)] = b"1" * (1 << 20)
    view = links.loans.lend(links.arenas[1].buffer, 1, kept, 1 << 20)
    file = os.dup(links.memory.fd)
    links.close()
    assert 512 * os.fstat(file).st_blocks < 3 << 19 and bytes(view) == b"1" * (1 << 20)
    os.close(file)


def _next_of(workers: Workers) -> Exit | Opened:
    found: list[Exit | Opened] = []
    assert wait_until(lambda: found.extend(workers.news()) or found)  # type: ignore[func-returns-value, redundant-expr]
    [one] = found
    return one


def test_a_worker_begins_once_its_parent_knows_of_it() -> None:
    """The one that forked it may be killed before it has told."""
    with open_links() as links:
        worker = FORK.Process(target=links.board.await_parent, args=(0,))
        worker.start()
        assert worker.pid is not None and not readable(worker.sentinel, 0.1)
        links.board.words[links.board.row(0) + KNOWN] = worker.pid
        worker.join()
        worker.close()


@pytest.mark.parametrize("forks", [True, False], ids=["forked by the spawner", "started"])
def test_a_replacement_is_told_its_own_blocks(forks: bool) -> None:
    """However many there are."""
    found = FORK.Value("q", 0, lock=False)  # a lock could be the killed one's for ever
    blocks = [(at << 12, 7) for at in range(50_000)]
    with open_links() as links:
        links.arenas[0].occupy = lambda blocks: setattr(found, "value", sum(each for _, each in blocks))  # type: ignore[method-assign]
        with started(links, job(lambda key: key), forks=forks, replaceable=True) as workers:
            workers.kill(0, "")
            assert isinstance(_next_of(workers), Exit)
            workers.replace(0, blocks)
            assert isinstance(_next_of(workers), Opened)
            assert wait_until(lambda: found.value == 7 * len(blocks))


@pytest.mark.parametrize("more", [{}, {"collate_fn": list}, {"collate_fn": lambda samples: default_collate(samples)}])
def test_workers_make_no_name_in_shared_memory(more: dict[str, Any]) -> None:
    """So none can stay where one is killed, and ``tests.support.leaks`` need not look for any."""
    samples: Any = [torch.full((5,), index) for index in range(8)]
    watch = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert _LIBC.inotify_add_watch(watch, b"/dev/shm", _IN_CREATE) >= 0
    pids: set[int] = set()
    for _ in DataLoader(samples, 2, num_workers=2, **more):
        pids.update(child_pids())
    events = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            events += os.read(watch, 1 << 16)
    os.close(watch)
    assert not [made for made in re.finditer(rb"torch_(\d+)_\w+", events) if int(made[1]) in pids]


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
