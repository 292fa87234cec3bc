"""Processes that write to the index by turns: none sleeps on because another was killed while it waited."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import lmdb
import pytest

from minato_gpu.sources.disk.index import Index
from tests.support.waiting import wait_until

_FORK = multiprocessing.get_context("fork")


@contextmanager
def _child(path: Path, core: int | None = None) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that opens the index and writes to it, each when it is told to. On ``core``: it runs only when nobody
    else wants to."""

    def run() -> None:
        theirs.recv()
        index = Index(path)
        if core is not None:
            os.sched_setaffinity(0, {core})
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        theirs.send("opened")
        theirs.recv()
        theirs.send("writes")
        with index.write():
            theirs.send("written")
        os._exit(0)

    ours, theirs = _FORK.Pipe()
    child = _FORK.Process(target=run)
    child.start()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()


@contextmanager
def _kept_busy(core: int) -> Iterator[None]:
    def run() -> None:
        os.sched_setaffinity(0, {core})
        while True:
            pass

    child = _FORK.Process(target=run)
    child.start()
    assert wait_until(lambda: os.sched_getaffinity(child.pid or 0) == {core})
    try:
        yield
    finally:
        child.kill()
        child.join()


def _sleeps(child: BaseProcess) -> bool:
    return Path(f"/proc/{child.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "S"


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no such way of scheduling")
def test_who_is_killed_while_it_waits_takes_nobodys_turn(tmp_path: Path) -> None:
    """The first of two that wait is woken, does not come to run before the index is written to once more, and is
    killed: who waited behind it must hear of the end of that."""
    core = min(os.sched_getaffinity(0))
    with _child(tmp_path, core) as (first, to_first), _child(tmp_path) as (second, to_second):
        index = Index(tmp_path)
        for to_child in (to_first, to_second):
            to_child.send("open")
            assert to_child.recv() == "opened"
        with ExitStack() as busy:
            with index.write():
                for child, to_child in ((first, to_first), (second, to_second)):
                    to_child.send("write")
                    assert to_child.recv() == "writes"
                    assert wait_until(lambda child=child: _sleeps(child))  # type: ignore[misc]
                busy.enter_context(_kept_busy(core))
            with index.write():
                first.kill()
                busy.close()
                first.join()
        assert to_second.poll(20) and to_second.recv() == "written"
        index.close()


def test_there_is_no_turn_once_the_index_is_closed(tmp_path: Path) -> None:
    """A thread may have been waiting for it: for a tier that is a miss, as any error of LMDB's."""
    index = Index(tmp_path)
    index.close()
    with pytest.raises(lmdb.Error, match="closed"), index.write():
        pass
