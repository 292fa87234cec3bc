"""Starts the script in a process of its own, and ends it in time, with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

from minato_gpu.lab.analysis.order import FINAL, Order, Result, result_of

START_S = 600.0
"""Seconds until the loader must have been asked for a few batches."""
_LONGER = 1.25  # times its seconds: then the analysis is stopped, and what is there is shown
_GRACE_S = 20.0  # to end cleanly, or for the other ranks' results
_LOOK_S = 0.1


def run(order: Order) -> Result:
    """Run the script, and return what was measured, whatever became of it.

    It is a process group of its own; whatever of it is left when the analysis has ended is ended too. Its standard
    output goes to standard error, so that the figures stand alone. Raises KeyboardInterrupt once it has ended.
    """
    with _terminated_in_order():
        process = started(order)
        try:
            _wait(process, order)
        except BaseException:
            _interrupt(process)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = result_of(Path(order.folder), order.rank)
    if found is None:
        return Result("died", order.rank, f"it could not be started (exit code {process.returncode})")
    if found.status in FINAL:
        return found
    how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return Result("died", order.rank, f"it was ended by {how}", found.profile, found.loaders, found.tried)


def started(order: Order) -> subprocess.Popen[bytes]:
    """The script's process."""
    command = [sys.executable, "-m", "minato_gpu.lab.analysis.child", order.text()]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)


def _wait(process: subprocess.Popen[bytes], order: Order) -> None:
    """Until the script has ended, or has had its time."""
    limit, begun = monotonic() + START_S, False
    while True:
        try:
            process.wait(_LOOK_S)
            return
        except subprocess.TimeoutExpired:
            pass
        found = result_of(Path(order.folder), order.rank)
        if found is not None and found.status == "measuring" and not begun:
            limit, begun = monotonic() + _LONGER * (order.seconds + order.verify_s) + _GRACE_S, True
        if found is not None and found.status in FINAL:
            limit = min(limit, monotonic() + _GRACE_S)
        if monotonic() > limit:
            _interrupt(process)
            return


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, and wait a little."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(_GRACE_S)


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """A request to end (torchrun sends one to every rank once another has failed) ends the script, too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def others(folder: Path, ranks: range) -> list[Result]:
    """What the other ranks of this host have measured, once they are ready."""
    until = monotonic() + _GRACE_S
    found: list[Result] = []
    for rank in ranks:
        while ((result := result_of(folder, rank)) is None or result.status not in FINAL) and monotonic() < until:
            sleep(_LOOK_S)
        if result is not None:
            found.append(result)
    return found
