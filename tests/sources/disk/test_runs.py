"""Which copies are of no use to any run: decided from when runs began, their epochs, and when they were heard of."""

from __future__ import annotations

import math
import os
from pathlib import Path

from minato_gpu.caching.orders import Part
from minato_gpu.sources.disk import records
from minato_gpu.sources.disk.index import Index
from minato_gpu.sources.disk.records import Run
from minato_gpu.sources.disk.runs import Runs, begun, needs_from, unused_before
from tests.sources.disk.content import Elsewhere

HOUR, DAY = 3600.0, 86400.0
NEW = Run(b"k", 0, 1, 2, 0.0, 0.0, 0.0, 0.0, 100)
T = 1e9


def epochs(*at: float) -> Run:
    """A run that has begun epochs then."""
    run = NEW
    for each in at:
        run = begun(run, each)
    return run


def test_any_copy_may_be_of_use_while_the_first_epoch_goes_on() -> None:
    assert needs_from(NEW, T) == math.inf, "nobody has heard of it"
    assert needs_from(epochs(T), T + 10) == 0.0
    assert needs_from(epochs(T)._replace(heard=T + HOUR), T + HOUR + 10) == 0.0


def test_what_has_been_used_since_the_run_began_is_of_use() -> None:
    assert needs_from(epochs(T, T + 10), T + 11) == T
    assert needs_from(epochs(T, *(T + 10 * epoch for epoch in range(1, 1000))), T + 10_000) == T


def test_but_for_what_has_been_used_neither_for_a_day_nor_in_the_last_epoch() -> None:
    many = epochs(*(T + HOUR * epoch for epoch in range(100)))
    assert needs_from(many, T + 99 * HOUR) == T + 99 * HOUR - DAY - HOUR, "uses are written down to the hour"
    long = epochs(T, T + 2 * DAY, T + 4 * DAY)
    assert needs_from(long, T + 4 * DAY) == T + 2 * DAY - HOUR


def test_a_run_that_reads_nothing_holds_on_to_what_it_has_used_for_a_day() -> None:
    once = epochs(T)._replace(heard=T + 100)
    assert needs_from(once, T + 100 + 900) == 0.0
    assert needs_from(once, T + 100 + 901) == T
    assert needs_from(once, T + 100 + DAY) == T
    assert needs_from(once, T + 101 + DAY) == math.inf


def test_of_several_runs_each_is_heeded() -> None:
    assert unused_before([epochs(T, T + 10), epochs(T + 5, T + 10)], T + 11) == T
    assert unused_before([epochs(T, T + 10), epochs(T + 5)], T + 11) == 0.0


def test_uses_are_written_down_once_for_each_run_and_hour(path: Path) -> None:
    path.mkdir()
    index = Index(path)
    mine = Runs(index, "mine", os.getpid(), 100)
    mine.begin(T)
    assert mine.is_old(T - 1, T + 10)
    assert not mine.is_old(T, T + 10)
    assert not mine.is_old(T + HOUR, T + 2 * HOUR)
    assert mine.is_old(T + HOUR, T + 2 * HOUR + 1)
    index.close()


def test_a_run_goes_on_in_another_process_that_reads_for_it(path: Path) -> None:
    path.mkdir()
    for epoch in range(3):
        index = Index(path)
        mine = Runs(index, "mine", os.getpid(), 100)
        assert mine.limits(T + 10 * epoch)[0] == 0.0, "it is not known yet"
        mine.begin(T + 10 * epoch)
        assert mine.limits(T + 10 * epoch)[0] == (0.0, T, T)[epoch]
        index.close()


def test_a_run_ends_with_its_process(path: Path) -> None:
    path.mkdir()
    other = Elsewhere(lambda: None)
    index = Index(path)
    mine, theirs = Runs(index, "mine", os.getpid(), 100), Runs(index, "theirs", other._child.pid or 0, 200)
    mine.begin(T)
    theirs.begin(T - 50)
    mine.begin(T + 10)
    assert mine.limits(T + 11) == (0.0, 200), "their first epoch goes on"
    theirs.begin(T + 12)
    assert mine.limits(T + 13) == (T - 50, 200)
    assert other.succeeds()
    assert mine.limits(T + 14) == (T, 100)
    index.close()


def test_of_processes_that_cannot_be_seen_runs_end_when_they_are_not_heard_of(
    path: Path,
) -> None:
    path.mkdir()
    index = Index(path)
    mine, theirs = Runs(index, "mine", os.getpid(), 100), Runs(index, "theirs", 2**22 + 1, 100)
    mine.begin(T)
    theirs.begin(T)
    mine.begin(T + 10)
    assert mine.limits(T + 10)[0] == T, "there is no such process"
    theirs = Runs(index, "theirs", 2**22 + 1, 100)
    theirs._new = theirs._new._replace(namespace=1)
    theirs.begin(T - 50)
    assert mine.limits(T + 10)[0] == 0.0
    theirs.heard(T + DAY)
    assert mine.limits(T + 2 * DAY)[0] == T - 50
    assert mine.limits(T + 2 * DAY + 1)[0] == T
    index.close()


def test_what_the_other_runs_read_is_told_while_they_need_copies(path: Path) -> None:
    path.mkdir()
    index = Index(path)
    here = os.getpid()
    mine, theirs, quiet = (Runs(index, name, here, 100) for name in ("mine", "theirs", "quiet"))
    part = Part(b"0123456789abcdef", 3, 7)
    mine.begin(T, part)
    assert mine.beside(T) == []
    assert theirs.beside(T) == [part]
    theirs.begin(T, part._replace(rank=4))
    quiet.begin(T)
    Runs(index, "dead", 2**22 + 1, 100).begin(T, part)
    assert {*mine.beside(T)} == {part._replace(rank=4), None}
    theirs.heard(T + DAY)
    theirs.begin(T + DAY, part._replace(epoch=8))
    assert mine.beside(T + DAY + 1) == [part._replace(epoch=8)], "of the other nobody has heard for a day"
    index.close()


def test_a_run_that_says_nothing_of_what_it_reads_is_written_down_as_before() -> None:
    """By an earlier version too."""
    told = NEW._replace(part=Part(b"0123456789abcdef", 3, -7))
    for run in (NEW, told):
        assert Run.unpack(b"k", run.pack()) == run
    assert NEW.pack() == records._RUN.pack(*NEW[1:9])


def test_a_run_has_read_once_its_first_epoch_has_ended(path: Path) -> None:
    path.mkdir()
    for epoch in range(3):
        index = Index(path)
        mine = Runs(index, "mine", os.getpid(), 100)
        assert not mine.has_read
        mine.begin(T + 10 * epoch)
        assert mine.has_read == (epoch > 0)
        index.close()
