"""Memory that outlives reader processes: to one at a time, and only what one has left whole is taken up by the next."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from minato_gpu.sources.blocks import Blocks
from minato_gpu.sources.kept_memory import KeptMemory, Table
from minato_gpu.sources.memory_tier import Copy
from minato_gpu.sources.source import fields_key
from tests.support.leaks import check_scenario

_FORK = multiprocessing.get_context("fork")
COPIES = [(0, Copy(("/a", 0, None), 4096, 100, 77, 0.5)), (7, Copy(("s3://b/\udc80 é", 5, 10), 1 << 40, 10, 78, 0.0))]


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table(os.memfd_create("test"))
    yield made
    os.close(made.fd)


def memory_of(fd: int) -> int:
    """Bytes of memory behind a descriptor."""
    return os.fstat(fd).st_blocks * 512


def in_child(act: Callable[[], object]) -> int:
    """Its exit code."""
    child = _FORK.Process(target=act)
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def test_what_is_left_is_taken_up_once(table: Table) -> None:
    assert table.take() is None
    for left in ((1, [], ()), (2, COPIES, (0.5, 2.0)), (1, COPIES[:1], ())):
        table.leave(left)
        assert table.take() == left
        assert table.take() is None
    assert memory_of(table.fd) == 0


def test_fields_that_something_else_has_made_are_not_taken_up(table: Table) -> None:
    fields = [(3, Copy(fields_key(3), 8192, 10, 79, 0.5))]
    for makers, found in (
        (b"same", ((1, COPIES + fields, (0.5,)))),
        (b"other", (1, COPIES, ())),
        (b"", (1, COPIES, ())),
    ):
        table.leave((1, COPIES + fields, (0.5,)), b"same")
        assert table.take(makers) == found


@pytest.mark.parametrize("after", range(4))
def test_a_table_that_was_not_written_to_its_end_is_none(
    table: Table, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer is killed at one of its calls, each of which writes some bytes only."""
    write, calls = os.pwrite, []

    def some(fd: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) > after:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(fd, data[:40], offset)

    monkeypatch.setattr(os, "pwrite", some)
    assert in_child(lambda: table.leave((2, COPIES, ()))) == -signal.SIGKILL
    monkeypatch.undo()
    assert after == 0 or os.fstat(table.fd).st_size > 0
    assert table.take() is None
    table.leave((1, COPIES, ()))
    assert table.take() == (1, COPIES, ()), "the next begins anew"


def test_it_is_lent_to_one_at_a_time() -> None:
    def scenario() -> None:
        kept = KeptMemory(1000)
        first = kept.lend()
        assert first is not None
        assert kept.lend() is None
        first.close()
        assert kept.lend() is None, "workers may still be at it: until the reader process has ended"
        kept.give_back()
        second = kept.lend()
        assert second is not None
        second.close()

    check_scenario(scenario)


def killed(kept: KeptMemory) -> None:
    """A reader process that is killed."""
    arena = kept.lend()
    assert arena is not None
    blocks = Blocks(arena)
    for _ in range(20):
        blocks.allocate(10_000)[1][:] = bytes(10_000)
    os.kill(os.getpid(), signal.SIGKILL)


def test_of_a_process_that_was_killed_nothing_is_left() -> None:
    kept = KeptMemory(1 << 20)
    assert in_child(lambda: killed(kept)) == -signal.SIGKILL
    arena = kept.lend()
    assert arena is not None
    assert memory_of(arena.fd) > 0
    kept.give_back()
    assert memory_of(arena.fd) == 0
    assert kept.table.take() is None
    arena.close()
