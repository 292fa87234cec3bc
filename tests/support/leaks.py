"""What a test leaves behind: processes, threads, shared memory and file descriptors (promise P7).

A ``Snapshot`` is taken before and compared after. What stops by itself within the limit is no leak, so the
comparison waits for the condition "nothing new is left".

Decision: descriptors are compared by kind and count, not by number, because the kernel gives a closed number to
the next file. Helpers that live as long as the interpreter, those of ``multiprocessing`` (resource tracker, fork
server, descriptor sharing) and that of ``tests.support.programs``, are not leaks of a loader.

The name that PyTorch gives to memory while it shares a tensor counts only while its maker lives: PyTorch unlinks it at
once, unless the maker dies just then. Our workers make none (``tests.lanes.test_processes`` shows it), so one of a
dead process was left by PyTorch's own loader, in this test or in one beside it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support import programs
from tests.support.waiting import wait_until

_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_SHARED_MEMORY = Path("/dev/shm")
_OF_TORCH = re.compile(r"torch_(\d+)_")  # a tensor that the process of this id was sharing
_SEMAPHORE = "shared memory sem.mp-"
_TRACKER_S = 20.0


@dataclass(frozen=True)
class Snapshot:
    """The state of this process: child process ids, Python threads, native thread count, shared memory, descriptors."""

    processes: frozenset[int]
    threads: frozenset[int]
    native_threads: int
    shared_memory: frozenset[str]
    descriptors: Counter[str]


def threads_since(before: Iterable[threading.Thread]) -> list[str]:
    """Names of the package's threads that were not there ``before``: other tests may have left some."""
    return [thread.name for thread in {*threading.enumerate()} - {*before} if thread.name.startswith("minato-")]


def take_snapshot(*, descriptors: bool = True) -> Snapshot:
    """The state now; without ``descriptors`` none of them is looked at, which takes most of the time."""
    return Snapshot(
        processes=frozenset(child_pids()),
        threads=frozenset(thread.ident or 0 for thread in threading.enumerate() if not _lasts(thread)),
        native_threads=psutil.Process().num_threads(),
        shared_memory=frozenset(entry.name for entry in _SHARED_MEMORY.iterdir()),
        descriptors=Counter(map(_kind, open_links()) if descriptors else ()),
    )


def child_pids() -> list[int]:
    """Ids of all living descendants of this process, without ``multiprocessing``'s own helpers; zombies count."""
    found = []
    looking = [(child, False) for child in _children(os.getpid())]
    while looking:
        pid, of_helper = looking.pop()
        helps = pid in programs.server_pids or (not of_helper and _is_helper(pid))
        if not helps:
            found.append(pid)
        looking += [(child, helps) for child in _children(pid)]
    return found


@contextlib.contextmanager
def no_child_stays() -> Iterator[None]:
    """What is forked within it ends soon after. What an earlier test has left in a traceback may end later."""
    before = set(child_pids())
    yield
    assert wait_until(lambda: before.issuperset(child_pids())), [*map(_describe, {*child_pids()} - before)]


def _children(pid: int) -> list[int]:
    """From /proc, not from psutil, which reads every process of the machine for it: this runs around every test."""
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it ended while we looked
        return []


def _descendants(pid: int) -> list[int]:
    return [each for child in _children(pid) for each in (child, *_descendants(child))]


def _is_helper(pid: int) -> bool:
    """By its command line, which a fork server's children have as well: who asks knows whose child it is."""
    try:
        return any(helper in part for part in psutil.Process(pid).cmdline() for helper in _HELPERS)
    except psutil.ZombieProcess:  # ended, but nobody waited for it: that is a leak
        return False
    except psutil.NoSuchProcess:
        return True


def _lasts(thread: threading.Thread) -> bool:
    """multiprocessing's thread that hands descriptors to children is started once, and never ended; so is fsspec's. The
    one that tells ``minato-gpu top`` lives as long as any loader does, perhaps one that a traceback keeps alive:
    that it ends is shown where it is tested (``tests.observe``)."""
    return "(_serve)" in thread.name or thread.name in ("minato-watch", "fsspecIO")


@contextlib.contextmanager
def descriptors_below(limit: int) -> Iterator[None]:
    """New descriptors have numbers below this one, or cannot be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def stop(pid: int) -> None:
    """Stop a process: each of its threads stops as it comes to run, which may be after the signal was sent."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    assert wait_until(lambda: all(_state(task) == "T" for task in tasks.iterdir()))


def _state(task: Path) -> str:
    return (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def open_links(pid: int | str = "self") -> list[str]:
    """What each open descriptor of a process leads to, as in ``/proc``; one that is closed meanwhile is left out, as is
    the folder that this very listing opens."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(entry.readlink()))
    return links


def _kind(target: str) -> str:
    """One word for what a descriptor leads to: memfd, shm, pipe, socket, an anonymous kind, or file."""
    if target.startswith("/memfd:"):
        return "memfd"
    if target.startswith(str(_SHARED_MEMORY)):
        return "shm"
    return re.split(r":\[", target)[0] if ":[" in target else "file"


def leaks(before: Snapshot, *, descriptors: bool = True, native: bool = False) -> list[str]:
    """What is there now and was not in ``before``, in words; an empty list when nothing is."""
    now = take_snapshot(descriptors=descriptors)
    found = [f"process {pid}: {_describe(pid)}" for pid in sorted(now.processes - before.processes)]
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    found += [f"thread {known.get(ident, ident)}" for ident in sorted(now.threads - before.threads)]
    found += [f"shared memory {name}" for name in sorted(now.shared_memory - before.shared_memory) if _is_ours(name)]
    if descriptors:
        more = now.descriptors - before.descriptors
        found += [f"{count} more descriptors of kind {kind}" for kind, count in sorted(more.items())]
    if native and now.native_threads > before.native_threads:
        found.append(f"{now.native_threads - before.native_threads} more native threads")
    return found


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.status()} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return "gone meanwhile"


def _is_ours(name: str) -> bool:
    """Whether no process outside this one's family made or holds it: other programs share the machine's memory.

    What one has mapped is known by its inode: of a semaphore that it has made, the kernel tells another name.
    """
    family = {os.getpid(), *_descendants(os.getpid())}
    made_by = _OF_TORCH.match(name)
    if made_by is not None and int(made_by[1]) not in family:
        return False
    path = str(_SHARED_MEMORY / name)
    try:
        inode = f" {Path(path).stat().st_ino} "
    except FileNotFoundError:
        return False
    for process in psutil.process_iter():
        if process.pid in family:
            continue
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            held = open_links(process.pid)
        except OSError:
            continue
        if any(inode in each and str(_SHARED_MEMORY) in each for each in maps):
            return False
        if any(link.startswith(path) for link in held):
            return False
    return Path(path).exists()


def assert_no_leaks(before: Snapshot, *, descriptors: bool = True, native: bool = False, limit_s: float = 30.0) -> None:
    """Wait until nothing is left that ``before`` lacked; raise AssertionError with what stays.

    Only semaphores get longer: those of a killed program nobody may hold for a while, and its tracker removes them when
    the program's spawned workers have come up and found it gone.
    """

    def left() -> list[str]:
        return leaks(before, descriptors=descriptors, native=native)

    if not left():
        return
    gc.collect()
    if wait_until(lambda: not left(), limit_s):
        return
    if not wait_until(lambda: not left(), _TRACKER_S if all(_SEMAPHORE in each for each in left()) else 0.0):
        raise AssertionError("left behind: " + "; ".join(left()))


def check_scenario(scenario: Callable[[], object], *, limit_s: float = 30.0) -> None:
    """Run ``scenario`` once to warm up (lazy imports, thread pools), then again and compare everything."""
    before = take_snapshot(descriptors=False)
    scenario()
    assert_no_leaks(before, descriptors=False, limit_s=limit_s)
    gc.collect()  # garbage of the first run that still holds descriptors would make room for leaks of the second
    before = take_snapshot()
    scenario()
    assert_no_leaks(before, native=True, limit_s=limit_s)
