"""Copies that nobody uses any more make room for what is read now; all others stay."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from minato_gpu.sources.disk import freeing, upkeep
from minato_gpu.sources.disk.directory import Directory
from minato_gpu.sources.disk.tier import DiskTier
from tests.sources.disk.content import BUDGET, SEGMENT, VERSION, Elsewhere, content, disk_bytes, elsewhere, held, keep

ROOM = 140  # copies of 50,000 bytes, about


class Clock:
    """A time for the tier, which passes when a test says so, and a little with each look."""

    def __init__(self) -> None:
        self.now = 1e9

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


def test_what_a_run_before_has_left_makes_room_after_the_first_epoch(path: Path, clock: Clock) -> None:
    run_elsewhere(path, clock, range(300))
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
    order = range(400)
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
    run_elsewhere(path, clock, range(300))
    tier = opened(path, "mine")
    order = range(50, 500)  # some of these are there
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
    run_elsewhere(path, clock, range(60))
    theirs, mine = range(20, 120), range(1000, 1300)
    tier = opened(path, "theirs")
    epoch(tier, theirs)
    tier.close()
    tier = opened(path, "mine")
    for _ in range(3):
        epoch(tier, mine)
    assert kept(tier) >= {*range(120)}, "their first epoch may go on"
    tier.close()
    tier = opened(path, "theirs")
    assert epoch(tier, theirs) == 100
    tier.close()
    tier = opened(path, "mine")
    for _ in range(3):
        epoch(tier, mine)
    assert kept(tier) >= {*theirs}
    assert not kept(tier) & {*range(20)}
    clock.now += 86400 + 2
    for _ in range(3):
        epoch(tier, mine)
    assert not kept(tier) & {*theirs}, "nobody has heard of them for a day"
    tier.close()


def test_one_process_at_a_time_removes(path: Path, clock: Clock) -> None:
    run_elsewhere(path, clock, range(300))
    holds = Elsewhere(lambda: _own_for_ever(path))
    tier = opened(path, "mine")
    for number in range(2):
        epoch(tier, range(1000 * number, 1000 * number + 30))
    owner = Directory(path, make=False)
    with owner.owned() as owned:
        assert owned
        assert keep(tier, *range(2000, 2020)) <= 2, "what was made free before"
    with owner.owned() as owned:
        assert owned, "it has been let go of"
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
    """Copies of no use go first."""
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


def test_a_smaller_budget_than_another_run_has_removes_nothing_of_that_ones(path: Path, clock: Clock) -> None:
    tier = opened(path, "large")
    for _ in range(2):
        epoch(tier, range(130))
    tier.close()
    tier = opened(path, "small", BUDGET // 2)
    for _ in range(3):
        epoch(tier, range(1000, 1010))
    assert kept(tier) == {*range(130)}
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


def test_without_a_run_nothing_goes(path: Path, clock: Clock) -> None:
    run_elsewhere(path, clock, range(300))
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    before = kept(tier)
    for _ in range(3):
        epoch(tier, range(1000, 1100))
        tier.tell_uses()
    assert kept(tier) >= before
    assert tier.stats()["evicted"] == 0
    tier.close()


def test_long_lists_are_made_piece_by_piece(path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_LISTED", 10)
    monkeypatch.setattr(upkeep, "_AT_A_TIME", 3)
    run_elsewhere(path, clock, range(300))
    tier = opened(path, "mine")
    for _ in range(3):
        epoch(tier, range(1000, 1300))
    assert min(kept(tier)) == 1000
    tier.close()


def test_a_disk_without_holes_gives_room_by_whole_segments(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freeing, "punch_hole", lambda *_: False)
    run_elsewhere(path, clock, range(300))
    tier = opened(path, "mine")
    for _ in range(4):
        epoch(tier, range(1000, 1100))
    assert epoch(tier, range(1000, 1100)) >= 90
    assert disk_bytes(path) <= tier.nbytes() <= BUDGET
    tier.close()


def test_a_copy_whose_use_was_written_down_meanwhile_is_dropped_when_it_is_damaged(path: Path, clock: Clock) -> None:
    run_elsewhere(path, clock, range(3))
    tier = opened(path, "mine")
    tier.begin_epoch()
    entry = tier.find(b"1", VERSION)
    assert entry is not None
    into: Any = memoryview(bytearray(50_000))
    assert tier.read(entry, into)
    tier.tell_uses()
    with next((path / "segments").iterdir()).open("r+b") as file:
        file.seek(entry.offset)
        file.write(b"spoilt")
    assert not tier.read(entry, into)
    assert tier.stats()["corrupt"] == 1
    assert kept(tier) == {0, 2}
    tier.close()


def test_what_is_let_go_of_gives_its_room_to_others(path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece, after the run's first epoch, and only if it may beside others."""
    monkeypatch.setattr("minato_gpu.sources.disk.tier._AT_A_TIME", 7)
    tier = opened(path, "mine")
    epoch(tier, range(300))
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
    assert disk_bytes(path) <= tier.nbytes() <= BUDGET
    assert keep(tier, *range(1000, 1100)) >= 40
    assert disk_bytes(path) <= tier.nbytes() <= BUDGET
    tier.close()
    assert tier.let_go(names, lambda others: True), "of what is closed nothing goes"


def test_what_a_killed_process_had_let_go_of_is_given_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> None:
        tier = opened(path, "theirs")
        for _ in range(2):
            epoch(tier, range(30))
        monkeypatch.setattr(freeing, "punch_hole", lambda *_: os._exit(0))
        tier.let_go([b"1", b"2"], lambda others: True)

    assert elsewhere(other)
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    assert kept(tier) == {*range(30)} - {1, 2}
    assert all(held(tier, number) == content(number) for number in kept(tier))
    assert disk_bytes(path / "segments") <= 28 * 53_248 + (64 << 10)
    tier.close()
