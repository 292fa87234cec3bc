"""The budget in bytes holds over all processes; copies that nobody uses any more make room for what is read now, and
all others stay."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from minato_gpu.sources.disk.entry import disk_space_of
from minato_gpu.sources.disk.tier import DiskTier
from tests.sources.disk.content import (
    BUDGET,
    content,
    disk_bytes,
    elsewhere,
    file_of,
    held,
    keep,
    kept,
    key,
)

ROOM = 135  # copies of 50,000 bytes
T = 1e9


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


def run_elsewhere(path: Path, numbers: Iterable[int]) -> None:
    """A run of a process that has ended."""

    def other() -> None:
        tier = DiskTier(path, BUDGET)
        for _ in range(2):
            epoch(tier, numbers)
        tier.close()

    assert elsewhere(other)


# --- the budget ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [50_000, 700_000])
def test_no_more_is_taken_than_the_budget_and_what_is_removed_is_free_again(
    path: Path, tier: DiskTier, size: int
) -> None:
    count = 3 * BUDGET // max(size, 4096)
    taken = keep(tier, *range(count), size=size)
    full = disk_bytes(path)
    assert full <= tier.nbytes() <= BUDGET
    assert taken * disk_space_of(size) > 0.7 * BUDGET  # and not much less
    assert (tier.stats()["refused"], tier.stats()["written"]) == (count - taken, taken)
    freed = tier.remove(key(number) for number in range(0, taken, 2))
    assert freed == (taken + 1) // 2 * disk_space_of(size)
    assert disk_bytes(path) == full - freed
    assert all((held(tier, number) == content(number, size)) == (number % 2 == 1) for number in range(taken))
    assert keep(tier, *range(count, 2 * count), size=size) >= taken // 2 - 1
    assert disk_bytes(path) <= tier.nbytes() <= BUDGET


# --- what makes room -------------------------------------------------------------------------------------------


def test_the_longest_unused_goes_first_and_what_is_hit_stays(path: Path) -> None:
    run_elsewhere(path, range(160))
    for number in range(ROOM):
        os.utime(file_of(path, number), (T + number % 100, T + number % 100))
    tier = DiskTier(path, BUDGET)
    order = [*range(50, 100), *range(1000, 1030)]
    for _ in range(3):
        epoch(tier, order)
    assert epoch(tier, order) == 80
    gone = {*range(ROOM)} - kept(tier)
    assert gone and not gone & {*range(50, 100)}
    assert max(number % 100 for number in gone) <= min(number % 100 for number in kept(tier) & {*range(50)})
    tier.close()


def test_what_another_run_that_lives_uses_stays(path: Path) -> None:
    run_elsewhere(path, range(30))
    theirs, mine = range(20, 120), range(1000, 1160)
    tier, other = DiskTier(path, BUDGET), DiskTier(path, BUDGET)
    epoch(other, theirs)
    for _ in range(3):
        epoch(tier, mine[:40])
    assert kept(tier) >= {*range(120)}, "their first epoch may go on"
    assert epoch(other, theirs) == 100
    for _ in range(3):
        epoch(tier, mine[:40])
    assert kept(tier) >= {*theirs} and not kept(tier) & {*range(20)}
    other.close()
    tier.close()
    tier = DiskTier(path, BUDGET)
    for _ in range(3):
        epoch(tier, mine)
    assert not kept(tier) & {*theirs}
    tier.close()


def test_a_smaller_budget_holds_after_the_first_epoch(path: Path) -> None:
    """Copies of no use go first."""
    run_elsewhere(path, range(140))
    for number in range(ROOM):
        os.utime(file_of(path, number), (T, T))
    small = BUDGET // 2
    tier = DiskTier(path, small)
    order = range(70, 110)
    assert epoch(tier, order) == 40
    assert disk_bytes(path) > small
    assert epoch(tier, order) == 40
    assert disk_bytes(path) <= tier.nbytes() <= small
    assert kept(tier) >= {*order}
    tier.close()


def test_what_is_let_go_of_gives_its_room_to_others(path: Path) -> None:
    """After the run's first epoch, and where no other run is there."""
    tier = DiskTier(path, BUDGET)
    epoch(tier, range(160))
    full = kept(tier)
    names = [key(number) for number in sorted(full)[:100]]
    tier.let_go(names)
    assert kept(tier) == full, "others may be about to begin"
    tier.begin_epoch()
    other = DiskTier(path, BUDGET)
    assert not tier.is_alone()
    tier.let_go(names)
    assert kept(tier) == full
    other.close()
    tier.let_go([*names, key(3999)])
    assert tier.is_alone() and kept(tier) == {*sorted(full)[100:]} and tier.stats()["removed"] == 100
    assert keep(tier, *range(1000, 1100)) == 100
    tier.close()


def test_what_has_been_used_since_stays(path: Path) -> None:
    run_elsewhere(path, range(160))
    tier = DiskTier(path, BUDGET)
    epoch(tier, range(1000, 1002))
    epoch(tier, range(1000, 1002))  # makes room
    left = kept(tier) & {*range(160)}
    assert left and all(held(tier, number) == content(number) for number in left)
    keep(tier, *range(2000, 2100))
    assert kept(tier) >= left
    tier.close()
