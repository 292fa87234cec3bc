"""Run one measurement in a fresh process, as a user's training process would be, and leave nothing behind.

The process is forked, so that importing costs nothing, and leads its own process group: whatever a loader leaves
running is killed with it and cannot disturb the next measurement. What it writes to standard error (SPDL's shared
memory makes CPython's resource tracker complain at length) is shown only where the measurement fails. Also several
processes at once, and what this process and its descendants have used.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

Result = TypeVar("Result")

FORK = multiprocessing.get_context("fork")

_ENDING_S = 10.0  # from when a dying process has closed its pipe; it may write a core file
_HEAD, _TAIL = 1500, 2500  # characters of an error that are kept
_MODULES = re.compile(r"^Extension modules: .*(?:\n|\Z)", re.MULTILINE)  # by faulthandler, thousands of characters
_SETTLE_S = 0.5  # after a measurement, so that the kernel is through with what it left before the next one begins


at_end: list[Callable[[], object]] = []
"""What a measuring process calls before it is killed: it undoes what would outlive its processes."""


class MeasurementError(RuntimeError):
    """The measurement raised (its traceback is the message), died, or took too long."""


def isolated(
    function: Callable[..., Result],
    *arguments: Any,
    timeout_s: float = 300.0,
    settle_s: float = _SETTLE_S,
) -> Result:
    """What ``function(*arguments)`` returns in a fresh forked process; the result must pickle.

    ``settle_s``: the pause afterwards. Raises MeasurementError when it raises, dies, or takes longer than ``timeout_s``
    seconds.
    """
    ours, theirs = FORK.Pipe()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = FORK.Process(target=_child, args=(ours, theirs, complaints, function, arguments))
        process.start()
        theirs.close()
        try:
            return _received(ours, timeout_s, process)  # type: ignore[no-any-return]
        except MeasurementError as error:
            complaints.seek(0)
            # The last line says how it ended, what went before it why.
            raise MeasurementError(f"{excerpt(complaints.read())}\n{error}".strip()) from None
        finally:
            _end(process, settle_s)
            ours.close()


def together(count: int, function: Callable[..., Result], *arguments: Any, dead: int = 0) -> list[Result]:
    """What ``function(number, barrier, *arguments)`` returns in each of ``count`` forked processes, in any order.

    ``barrier`` is for all of them. So many as are ``dead`` are killed before they return.
    """
    barrier, found = FORK.Barrier(count), FORK.Queue()
    started = [FORK.Process(target=_one, args=(found, function, at, barrier, *arguments)) for at in range(count)]
    for process in started:
        process.start()
    results = [found.get(timeout=600.0) for _ in started[dead:]]
    for process in started:
        process.join()
    return results


def _one(found: Queue[Any], function: Callable[..., Any], *arguments: Any) -> None:
    found.put(function(*arguments))


def excerpt(text: str, tail: int = _TAIL) -> str:
    """The beginning of an error's text, and ``tail`` characters of its end.

    Of a process that aborted, what was thrown comes first and the stacks of its threads last. The list of extension
    modules, which faulthandler writes behind them, is left out.
    """
    text = _MODULES.sub("", text)
    left = len(text) - _HEAD - tail
    return text if left <= 0 else f"{text[:_HEAD]}\n[{left} characters left out]\n{text[-tail:]}"


def tree_peak_rss_bytes() -> int:
    """Peak resident bytes of this process and its descendants: the sum of each one's own high-water mark.

    Pages that processes share count in each of them, for every loader alike. Read once, at the end of the work, so
    that measuring costs the measured nothing. Linux only.
    """
    return _tree_bytes("status", "VmHWM")


def tree_pss_bytes() -> int:
    """Proportional bytes of this process and its descendants now: a page that n of them share counts 1/n in each."""
    return _tree_bytes("smaps_rollup", "Pss")


def tree_cpu_s() -> float:
    """CPU seconds of this process and all its descendants so far, those that have ended included."""
    return time.process_time() + descendants_cpu_s()


def descendants_cpu_s() -> float:
    """The same without this process: its children, theirs, and those of any of them that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _end(process: multiprocessing.process.BaseProcess, settle_s: float) -> None:
    """Kill the measurement's process group."""
    if process.pid is not None:
        # The leader is not reaped yet, so its number, which is the group's too, cannot belong to anyone else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
    time.sleep(settle_s)


def _received(receiver: Connection, timeout_s: float, process: multiprocessing.process.BaseProcess) -> Any:
    if not receiver.poll(timeout_s):
        raise MeasurementError(f"no result after {timeout_s:g} s")
    try:
        succeeded, value = receiver.recv()
    except EOFError:
        raise MeasurementError(f"the measuring process {_how_it_ended(process)} without a result") from None
    if not succeeded:
        raise MeasurementError(value)
    return value


def _how_it_ended(process: multiprocessing.process.BaseProcess) -> str:
    """What ended it, in words. It is not reaped: see ``_end``."""
    assert process.pid is not None
    end = time.monotonic() + _ENDING_S
    while (found := os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() > end:
            return "closed its pipe"
        time.sleep(0.01)
    if found.si_code == os.CLD_EXITED:
        return f"ended with status {found.si_status}"
    return f"was ended by {signal.Signals(found.si_status).name}"


def _child(
    ours: Connection,
    theirs: Connection,
    complaints: IO[str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ours.close()
    os.dup2(complaints.fileno(), 2)
    gc.collect()  # a fork shares its parent's pages until it writes to them, which a user's process does not pay for
    try:
        try:
            outcome = True, function(*arguments)
        except Exception:
            outcome = False, traceback.format_exc()
        for undo in at_end:
            undo()
        theirs.send(outcome)
        # The parent kills the whole group: a loader's own end is not what is measured. Should the parent be gone,
        # the connection ends instead.
        theirs.poll(None)
    finally:
        os.killpg(0, signal.SIGKILL)


def _tree_bytes(file: str, field: str) -> int:
    """The sum of a field of /proc/PID/FILE, given there in KiB, over this process and its descendants."""
    this = psutil.Process()
    return sum(_bytes(process.pid, file, field) for process in (this, *this.children(recursive=True)))


def _bytes(pid: int, file: str, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # ended since it was listed
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def evict(fd: int) -> None:
    """Has the page cache drop a file, as far as it is on disk; ``os.fdatasync`` brings it there."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
