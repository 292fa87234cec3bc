"""The script's process: it is started, and ended in time with all that it has started.

That process (``child.py``) gets its order on the command line, and leaves its result as a file in a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

from minato_gpu.lab.analysis.profile import Profile, Trial
from minato_gpu.lab.report import write_whole

Status = Literal["starting", "measuring", "complete", "ended", "died", "stopped"]
"""The state of an analysis: "starting" until a loader is chosen, then "measuring". At its end "complete", or why it is
not: the script "ended", "died" (of an error, a signal, an exit code), or was "stopped" (interrupted)."""
FINAL = ("complete", "ended", "died", "stopped")


@dataclass(frozen=True)
class ScriptOrder:
    """An order to run ``script`` with ``arguments``, and to analyse it for ``seconds``.

    ``script``: a path, or a module's name where it ``is_module``. ``loader``: which of its loaders, from 1 on; None:
    the one for training. ``folder``: where results are left, private to this user. ``verify_s``: seconds for other
    settings, after that.
    """

    script: str
    arguments: Sequence[str]
    folder: str
    seconds: float
    is_module: bool = False
    loader: int | None = None
    rank: int = 0
    ranks: int = 1
    verify_s: float = 0.0

    def text(self) -> str:
        """Returns the order as text, for the command line of the process: JSON of its fields."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Result:
    """The result of one rank's analysis so far."""

    status: Status
    rank: int
    message: str = ""  # what ended the script, in a sentence
    profile: Profile | None = None
    loaders: tuple[str, ...] = ()  # that it iterated, each in a few words
    tried: tuple[Trial, ...] = ()  # other settings

    def leave(self, folder: Path) -> None:
        """Writes the result, whole or not at all."""
        write_whole(folder / f"rank-{self.rank}", pickle.dumps(self))


def result_of(folder: Path, rank: int) -> Result | None:
    """Reads the result that this rank has left so far; None if it has left none."""
    try:
        found: Result = pickle.loads((folder / f"rank-{rank}").read_bytes())
    except FileNotFoundError:
        return None
    return found


def in_one_line(error: BaseException) -> str:
    """Returns an error's type and first line; of one that quotes a worker's traceback, as PyTorch's do, the last line,
    which has both."""
    kind, lines = type(error).__name__, str(error).strip().splitlines()
    if any("Traceback (most recent call last)" in line for line in lines):
        return lines[-1].strip()
    return f"{kind}: {lines[0]}" if lines else kind


START_S = 600.0
"""Seconds until the loader must have been asked for a few batches."""
_LONGER = 1.25  # times its seconds: then the analysis is stopped, and what is there is shown
_GRACE_S = 20.0  # to end cleanly, or for the other ranks' results
_LOOK_S = 0.1


def run(order: ScriptOrder) -> Result:
    """Runs the script, and returns what was measured, whatever became of it.

    The script is a process group of its own; whatever of it is left when the analysis has ended is ended too. Its
    standard output goes to standard error, so that the figures stand alone. On Ctrl-C or SIGTERM it is ended, and
    KeyboardInterrupt raised.
    """
    # torchrun sends SIGTERM to every rank once another has failed
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
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
    finally:
        signal.signal(signal.SIGTERM, before)
    found = result_of(Path(order.folder), order.rank)
    if found is None:
        return Result("died", order.rank, f"it could not be started (exit code {process.returncode})")
    if found.status in FINAL:
        return found
    how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return replace(found, status="died", message=f"it was ended by {how}")


def started(order: ScriptOrder) -> subprocess.Popen[bytes]:
    """Starts the script's process, as leader of a session and process group of its own."""
    command = [sys.executable, "-m", "minato_gpu.lab.analysis.child", order.text()]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)


def _wait(process: subprocess.Popen[bytes], order: ScriptOrder) -> None:
    """Waits until the script has ended; interrupts it once it has had its time."""
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
    """Interrupts the script as Ctrl-C does, and waits up to 20 seconds for its end."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(_GRACE_S)


def others(folder: Path, ranks: range) -> list[Result]:
    """Returns what these ranks of this host have left, after waiting up to 20 seconds for all to be final."""
    until = monotonic() + _GRACE_S
    found: list[Result] = []
    for rank in ranks:
        while ((result := result_of(folder, rank)) is None or result.status not in FINAL) and monotonic() < until:
            sleep(_LOOK_S)
        if result is not None:
            found.append(result)
    return found
