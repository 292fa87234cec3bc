"""Small parts that others are made of: threads, lazy properties, snapshots, random streams, spans."""

from __future__ import annotations

import multiprocessing
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minato_gpu
from minato_gpu import DataLoader
from minato_gpu.lanes.snapshots import Snapshot
from minato_gpu.samples import stream
from minato_gpu.scheduling.spans import add, count, cut, joined, number_at, without
from minato_gpu.util.cached_property import cached_property
from minato_gpu.util.threads import OwnThread
from tests.support.waiting import wait_until

PACKAGE = Path(minato_gpu.__file__).parent


# --- threads of our own, which signals do not end ---------------------------------------------------------------------


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """A signal that Python handles, as SIGCHLD is once PyTorch's own loader has had workers."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGUSR1, before)


def _interrupt(threads: list[Any], handled: list[int]) -> None:
    """Give each the signal a few times: at least one of them finds it waiting."""
    for _ in range(5):
        for thread in threads:
            count = len(handled)
            if thread.is_alive():
                signal.pthread_kill(thread.ident, signal.SIGUSR1)
                assert wait_until(lambda count=count: len(handled) > count)  # type: ignore[misc]


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is asked whether they live
def test_a_loaders_threads_go_on_after_a_signal(handled: list[int]) -> None:
    numbers: Any = range(64)
    before, loader = threading.enumerate(), DataLoader(numbers, 4, num_workers=1, worker_kind="thread")
    iterator: Any = iter(loader)
    got = next(iterator).tolist()
    own = [thread for thread in {*threading.enumerate()} - {*before} if isinstance(thread, OwnThread)]
    assert {"minato-pump", "minato-worker-0"} <= {thread.name for thread in own}
    _interrupt(own, handled)
    assert all(thread.is_alive() for thread in own)
    assert got + [key for batch in iterator for key in batch.tolist()] == list(numbers)


# --- properties that are computed once, without a lock that a fork could leave behind ---------------------------------


class Asked:
    """Has a property that is computed when the test says so."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    @cached_property
    def slow(self) -> int:
        """Waits."""
        self.begun.set()
        self.goes_on.wait()
        return 1


def _asks() -> None:
    asked = Asked()
    asked.goes_on.set()
    raise SystemExit(asked.slow + 4)


@pytest.mark.usefixtures("no_leaks")
def test_a_fork_in_the_middle_of_it_is_not_held_up() -> None:
    """As ``functools.cached_property`` of Python 3.11 does."""
    asked = Asked()
    thread = threading.Thread(target=lambda: asked.slow)
    thread.start()
    asked.begun.wait()
    child = multiprocessing.get_context("fork").Process(target=_asks)
    child.start()
    child.join()
    asked.goes_on.set()
    thread.join()
    assert child.exitcode == 5


def test_what_workers_may_use_has_no_other() -> None:
    rooms = PACKAGE.rglob("*.py")
    found = {
        file for file in rooms if re.search(r"^from functools import .*cached_property", file.read_text(), re.MULTILINE)
    }
    only = PACKAGE / "lab" / "simulation" / "work.py"  # no loader imports it, and it imports nothing but decisions
    assert found == {only}


# --- snapshots of states ----------------------------------------------------------------------------------------------


def test_what_changes_later_is_not_in_it() -> None:
    shared = [1, 2]
    value: dict[str, Any] = {"a": shared, "b": shared, "t": torch.arange(6).reshape(2, 3).T, "n": np.arange(3)}
    snapshot = Snapshot(value)
    shared.append(3)
    value["t"][:] = 0
    value["n"][:] = 0
    for _ in range(2):
        copy = snapshot.copy()
        assert copy["a"] == [1, 2] and copy["a"] is copy["b"]
        assert copy["t"].tolist() == [[0, 3], [1, 4], [2, 5]] and copy["n"].tolist() == [0, 1, 2]
        copy["a"].clear()
        copy["t"][:] = 7


def test_what_cannot_be_pickled() -> None:
    class Local:
        def __init__(self) -> None:
            self.at = [1]

    value = Local()
    snapshot = Snapshot({"own": value})
    value.at.append(2)
    copy: Any = snapshot.copy()
    assert copy["own"].at == [1] and copy["own"] is not snapshot.copy()["own"]


# --- a sample's random streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "number"), [(0, 0), (5, 1), ((1 << 63) + 11, 9), ((1 << 64) - 1, 1)])
def test_a_stream_is_philox_with_seed_and_number_as_its_key(seed: int, number: int) -> None:
    expected = np.random.Generator(np.random.Philox(key=np.array([seed, number], np.uint64)))
    found = stream(seed, number)
    assert str(found.bit_generator.state) == str(expected.bit_generator.state)
    for _ in range(2):
        assert found.random(9).tolist() == expected.random(9).tolist()
        assert (
            found.integers(7, size=5, dtype=np.uint8).tolist() == expected.integers(7, size=5, dtype=np.uint8).tolist()
        )
        assert found.standard_normal(3, np.float32).tolist() == expected.standard_normal(3, np.float32).tolist()


# --- spans ----------------------------------------------------------------------------------------------------------


PIECES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=6)


def rising(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of the given lengths, each after a gap."""
    out, at = [], 0
    for gap, size in pieces:
        out.append((at + gap, at + gap + size))
        at += gap + size
    return out


def numbers(spans: object) -> list[int]:
    return [number for lo, hi in spans for number in range(lo, hi)]  # type: ignore[attr-defined]


@given(PIECES, st.integers(0, 30), st.integers(0, 30))
def test_cut_by_offsets(pieces: list[tuple[int, int]], start: int, stop: int) -> None:
    spans = rising(pieces)[::-1]
    assert numbers(cut(spans, start, stop)) == numbers(spans)[start:stop]
    assert all(lo < hi for lo, hi in cut(spans, start, stop))
    assert [number_at(spans, offset) for offset in range(count(spans))] == numbers(spans)


@given(PIECES, st.data())
def test_one_more_is_put_where_it_belongs(pieces: list[tuple[int, int]], data: st.DataObject) -> None:
    spans = rising(pieces)
    gaps = [(lo, hi) for lo, hi in without([(0, 99)], spans) if lo < hi]
    lo, hi = data.draw(st.sampled_from(gaps))
    a = data.draw(st.integers(lo, hi - 1))
    b = data.draw(st.integers(a + 1, hi))
    expected = {*numbers(spans), *range(a, b)}
    add(spans, (a, b))
    assert spans == joined((number, number + 1) for number in sorted(expected))
