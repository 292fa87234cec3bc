"""The budget in bytes holds over all processes; copies that nobody uses any more make room for what is read now, and
all others stay."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from minato_gpu.caching.orders import Part
from minato_gpu.sources.disk import freeing
from minato_gpu.sources.disk.directory import Directory
from minato_gpu.sources.disk.index import Index
from minato_gpu.sources.disk.ledger import Ledger
from minato_gpu.sources.disk.records import Run, allotted
from minato_gpu.sources.disk.runs import Runs, begun, needs_from
from minato_gpu.sources.disk.tier import DiskTier
from tests.sources.disk.content import BUDGET, SEGMENT, Elsewhere, content, disk_bytes, elsewhere, held, keep

ROOM = 140  # copies of 50,000 bytes, about
HOUR, DAY = 3600.0, 86400.0
T = 1e9


class Clock:
    """A time for the tier, which passes when a test says so, and a little with each look."""

    def __init__(self) -> None:
        self.now = T

    def time(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.time", made.time)
    return made


def opened(path: Path, name: str, budget: int = BUDGET) -> DiskTier:
    """By a run of that name."""
    return DiskTier(path, budget, segment_bytes=SEGMENT, run=(name, os.getpid()))


def epoch(tier: DiskTier, numbers: Iterable[int]) -> int:
    """Read them all, from the source what has no copy; returns how many have one."""
    tier.begin_epoch()
    hits = 0
    for number in numbers:
        if held(tier, number) is None:
            keep(tier, number)
        else:
            hits += 1
    return hits


def kept(tier: DiskTier) -> set[int]:
    return {int(entry.key) for entry in tier.entries()}


def run_elsewhere(path: Path, clock: Clock, numbers: Iterable[int]) -> None:
    """A run of a process that has ended."""

    def other() -> None:
        tier = opened(path, "other")
        for _ in range(2):
            epoch(tier, numbers)
        tier.close()

    assert elsewhere(other)
    clock.now += 100  # theirs has gone on meanwhile


# --- the budget ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [50_000, 700_000])
def test_no_more_is_taken_than_the_budget_and_what_is_removed_is_free_again(
    path: Path, tier: DiskTier, size: int
) -> None:
    count = 3 * BUDGET // max(size, 4096)
    taken = keep(tier, *range(count), size=size)
    full = disk_bytes(path)
    assert full <= tier.nbytes() <= BUDGET
    assert taken * allotted(size, 4096) > 0.7 * BUDGET  # and not much less
    assert (tier.stats()["refused"], tier.stats()["written"]) == (count - taken, taken)
    freed = tier.remove(b"%d" % number for number in range(0, taken, 2))
    assert freed == (taken + 1) // 2 * allotted(size, 4096)
    assert disk_bytes(path) <= full - freed + (256 << 10)  # the index may grow
    assert all((held(tier, number) == content(number, size)) == (number % 2 == 1) for number in range(taken))
    assert keep(tier, *range(count, 2 * count), size=size) >= taken // 2 - 1
    assert disk_bytes(path) <= tier.nbytes() <= BUDGET
    tier.remove([entry.key for entry in tier.entries()])
    assert disk_bytes(path / "segments") <= 64 << 10


def test_it_is_that_of_all_processes_together(path: Path) -> None:
    other = Elsewhere(lambda: keep(DiskTier(path, BUDGET, segment_bytes=SEGMENT), *range(1000, 1200)))
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    keep(tier, *range(50))
    assert other.succeeds()
    assert disk_bytes(path) <= tier.nbytes() <= BUDGET
    assert keep(tier, *range(2000, 2100)) < 10
    assert all(held(tier, number) == content(number) for number in (*range(50), 1000))
    assert disk_bytes(path) <= BUDGET
    tier.close()


def test_what_a_killed_process_had_set_aside_or_not_freed_yet_is_given_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other() -> None:
        tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
        keep(tier, *range(30))
        monkeypatch.setattr(freeing, "punch_hole", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tier.remove([b"1", b"2"])

    assert elsewhere(other)
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    assert {number for number in range(30) if held(tier, number) == content(number)} == {*range(30)} - {1, 2}
    assert disk_bytes(path / "segments") <= 28 * 53_248 + (64 << 10)
    tier.close()
    index = Index(path / "index")
    assert Ledger(index, 4096).charged() == 28 * 53_248
    index.close()


# --- what makes room -------------------------------------------------------------------------------------------


def test_what_a_run_before_has_left_makes_room_after_the_first_epoch(path: Path, clock: Clock) -> None:
    run_elsewhere(path, clock, range(160))
    tier = opened(path, "mine")
    new = range(1000, 1100)
    assert epoch(tier, new) == 0
    assert tier.stats()["evicted"] == 0, "in the first epoch anything may be wanted yet"
    epoch(tier, new)
    assert epoch(tier, new) == 100
    assert kept(tier) >= {*new}
    assert disk_bytes(path) <= tier.nbytes() <= BUDGET
    assert all(held(tier, number) == content(number) for number in kept(tier))
    tier.close()


def test_a_data_set_larger_than_the_budget_stays_as_it_is(path: Path, clock: Clock) -> None:
    """Once the budget is full of it nothing is written and nothing goes, in this run and the next."""
    order = range(200)
    tier = opened(path, "mine")
    for _ in range(3):
        epoch(tier, order)
    before, full = tier.stats(), kept(tier)
    for _ in range(3):
        assert epoch(tier, reversed(order)) == len(full) > 0.9 * ROOM
    assert tier.stats()["bytes_written"] == before["bytes_written"]
    assert tier.stats()["evicted"] == 0
    tier.close()
    again = opened(path, "another loader")
    assert epoch(again, order) >= len(full)
    full, before = kept(again), again.stats()  # there may be room for another one or two
    for _ in range(3):
        assert epoch(again, order) == len(full)
    assert (again.stats()["bytes_written"], again.stats()["evicted"]) == (before["bytes_written"], 0)
    assert before["bytes_written"] <= 100_000
    again.close()


def test_of_copies_in_part_of_use_the_others_go_and_then_nothing_does(path: Path, clock: Clock) -> None:
    run_elsewhere(path, clock, range(160))
    tier = opened(path, "mine")
    order = range(50, 260)  # some of these are there
    for _ in range(3):
        epoch(tier, order)
    full, written = kept(tier), tier.stats()["bytes_written"]
    assert full <= {*order}
    assert full >= {*range(50, 130)}, "what is hit stays"
    assert epoch(tier, order) == len(full) > 0.9 * ROOM
    assert tier.stats()["bytes_written"] == written
    tier.close()


def test_what_another_run_that_goes_on_uses_stays(path: Path, clock: Clock) -> None:
    """Whether it has the directory open or not; what it does not use goes."""
    run_elsewhere(path, clock, range(30))
    theirs, mine = range(20, 120), range(1000, 1160)
    tier = opened(path, "theirs")
    epoch(tier, theirs)
    tier.close()
    tier = opened(path, "mine")
    for _ in range(3):
        epoch(tier, mine[:40])
    assert kept(tier) >= {*range(120)}, "their first epoch may go on"
    tier.close()
    tier = opened(path, "theirs")
    assert epoch(tier, theirs) == 100
    tier.close()
    tier = opened(path, "mine")
    for _ in range(3):
        epoch(tier, mine[:40])
    assert kept(tier) >= {*theirs}
    assert not kept(tier) & {*range(20)}
    clock.now += 86400 + 2
    for _ in range(3):
        epoch(tier, mine)
    assert not kept(tier) & {*theirs}, "nobody has heard of them for a day"
    tier.close()


def test_one_process_at_a_time_removes(path: Path, clock: Clock) -> None:
    run_elsewhere(path, clock, range(160))
    holds = Elsewhere(lambda: _own_for_ever(path))
    tier = opened(path, "mine")
    for number in range(2):
        epoch(tier, range(1000 * number, 1000 * number + 30))
    owner = Directory(path, make=False)
    with owner.owned() as owned:
        assert owned
        assert keep(tier, *range(2000, 2020)) <= 2, "what was made free before"
    owner.close()
    assert keep(tier, *range(2100, 2110)) == 10
    assert not holds.succeeds(), "it was killed"
    assert keep(tier, *range(3000, 3010)) == 10, "a dead owner is none"
    tier.close()


def _own_for_ever(path: Path) -> None:
    with Directory(path, make=False).owned() as owned:
        assert owned
        os.kill(os.getpid(), 9)


def test_a_smaller_budget_holds_after_the_first_epoch(path: Path, clock: Clock) -> None:
    """Copies of no use go first; of those of a run with a larger budget none."""
    run_elsewhere(path, clock, range(140))
    small = BUDGET // 2
    tier = opened(path, "mine", small)
    order = range(70, 110)
    assert epoch(tier, order) == 40
    assert disk_bytes(path) > small
    assert epoch(tier, order) == 40
    assert disk_bytes(path) <= tier.nbytes() <= small
    assert kept(tier) >= {*order}
    tier.close()
    tier = opened(path, "large")
    for _ in range(2):
        epoch(tier, range(130))
    tier.close()
    tier = opened(path, "mine", small)
    for _ in range(3):
        epoch(tier, range(1000, 1010))
    assert kept(tier) >= {*range(130)}
    tier.close()


def test_a_use_that_was_not_told_yet_is_before_copies_are_listed(path: Path, clock: Clock) -> None:
    """What has been listed to go and is used meanwhile stays."""
    run_elsewhere(path, clock, range(130))
    tier = opened(path, "mine")
    epoch(tier, range(1000, 1030))
    epoch(tier, range(1000, 1030))  # makes room, and lists the rest
    left = kept(tier) & {*range(130)}
    assert left
    for number in left:
        assert held(tier, number) == content(number)
    tier.tell_uses()
    keep(tier, *range(2000, 2100))
    assert kept(tier) >= left
    tier.close()


def test_what_is_let_go_of_gives_its_room_to_others(path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece, after the run's first epoch, and only if it may beside others."""
    monkeypatch.setattr("minato_gpu.sources.disk.tier._AT_A_TIME", 7)
    tier = opened(path, "mine")
    epoch(tier, range(160))
    full = kept(tier)
    names = [b"%d" % number for number in sorted(full)[:40]]
    assert tier.let_go(names, lambda others: True)
    assert kept(tier) == full, "others may be about to begin"
    tier.begin_epoch()
    assert tier.let_go(names, lambda others: others != [])
    assert kept(tier) == full
    assert tier.let_go([*names, b"no such copy"], lambda others: others == [])
    assert kept(tier) == {*sorted(full)[40:]}
    assert tier.stats()["removed"] == 40
    assert keep(tier, *range(1000, 1100)) >= 40
    assert disk_bytes(path) <= tier.nbytes() <= BUDGET
    monkeypatch.setattr(freeing, "punch_hole", lambda *_: False)
    assert not tier.let_go([b"1000"], lambda others: True), "the disk does not give its space back"
    tier.close()
    assert tier.let_go(names, lambda others: True), "of what is closed nothing goes"


# --- runs ------------------------------------------------------------------------------------------------------


def begun_at(*at: float) -> Run:
    """A run that has begun epochs then."""
    run = Run(b"k", 0, 1, 2, 0.0, 0.0, 0.0, 0.0, 100)
    for each in at:
        run = begun(run, each)
    return run


_QUIET = begun_at(T)._replace(heard=T + 100)


@pytest.mark.parametrize(
    ("run", "now", "needs"),
    [
        (begun_at(), T, math.inf),  # nobody has heard of it
        (begun_at(T), T + 10, 0.0),  # any copy may be of use in the first epoch
        (begun_at(T, T + 10), T + 11, T),  # then what has been used since it began
        (begun_at(*(T + HOUR * n for n in range(100))), T + 99 * HOUR, T + 99 * HOUR - DAY - HOUR),  # told to the hour
        (begun_at(T, T + 2 * DAY, T + 4 * DAY), T + 4 * DAY, T + 2 * DAY - HOUR),  # or in the last epoch
        (_QUIET, T + 100 + 900, 0.0),
        (_QUIET, T + 100 + 901, T),  # it reads nothing, and holds on to what it has used for a day
        (_QUIET, T + 101 + DAY, math.inf),
    ],
)
def test_what_is_of_use_to_a_run(run: Run, now: float, needs: float) -> None:
    assert needs_from(run, now) == needs


def test_a_run_ends_with_its_process(path: Path) -> None:
    path.mkdir()
    other = Elsewhere(lambda: None)
    index = Index(path)
    mine, theirs = Runs(index, "mine", os.getpid(), 100), Runs(index, "theirs", other._child.pid or 0, 200)
    mine.begin(T)
    theirs.begin(T - 50)
    mine.begin(T + 10)
    assert mine.limits(T + 11) == (0.0, 200), "their first epoch goes on"
    part = Part(b"0123456789abcdef", 3, 7)
    theirs.begin(T + 12, part)
    assert mine.limits(T + 13) == (T - 50, 200) and mine.beside(T + 13) == [part]
    assert other.succeeds()
    assert mine.limits(T + 14) == (T, 100) and mine.beside(T + 14) == []
    index.close()
