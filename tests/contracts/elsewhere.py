"""Goes on from a state in another process: a program, and what starts it."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from minato_gpu.util.messages import LOGGER
from tests.contracts.cases import Case
from tests.contracts.lineage import Lineage, Saved, check
from tests.support.programs import Program
from tests.support.waiting import wait_until

Request = tuple[Case, Path, str, int | None, Saved, int]  # as Lineage has them, and how many batches are taken


def run(request: Request, *, killed: bool) -> Saved | None:
    """What the program has saved; None where it was killed, whose processes all end."""
    program = Program("tests.contracts.elsewhere", at_once=True)
    if not killed:
        said, errors = program.communicate(pickle.dumps(request).hex())
        assert program.returncode == 0, errors[-5000:]
        saved: Saved = pickle.loads(bytes.fromhex(said.split()[-1]))
        check(request[0], replace(saved, parts=saved.parts[:-1]), saved.parts[-1])
        return saved
    program.stdin.write(pickle.dumps(request).hex() + "\n")
    program.stdin.flush()
    program.stdout.readline()  # it is at work
    program.kill()
    program.close()
    assert wait_until(lambda: not _session(program.pid)), f"left by a program that was killed: {_session(program.pid)}"
    return None


def _session(pid: int) -> list[int]:
    """The processes that a program has left."""
    found = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def main() -> None:
    """Go on, take batches, and save."""
    case, folder, death, budget, saved, count = pickle.loads(bytes.fromhex(sys.stdin.readline().strip()))
    LOGGER.setLevel(logging.CRITICAL + 1)
    warnings.simplefilter("ignore")
    line = Lineage(case, folder, death, budget)
    line.checks = False
    line.restore(saved, case.workers, same=True)
    for number in range(max(1, count)):
        going_on = line.take(min(count, 1))
        if number == 0:
            sys.stdout.write("at work\n")
            sys.stdout.flush()
        if not going_on:
            break
    sys.stdout.write(pickle.dumps(line.save()).hex() + "\n")
    line.drop()


if __name__ == "__main__":
    main()
