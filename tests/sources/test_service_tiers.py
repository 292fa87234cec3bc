"""What the reader process keeps for later epochs: blocks that nobody frees, and those that are written to disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.sources.blocks import space_of
from minato_gpu.sources.memory_tier import Begun, MemoryTier
from minato_gpu.sources.source import Key
from tests.sources.by_hand import SIZE, Bench, content, key
from tests.support.examples import half

PAGE = 4096


class Written:
    """A tier on disk that writes when the test says so. ``takes``: whether it has room."""

    def __init__(self) -> None:
        self.following = self
        self.takes = True
        self.waiting: list[tuple[str, Callable[[], None]]] = []
        self.late: set[tuple[int, int]] = set()  # samples and epochs after which they are not wanted soon
        self.gone: list[str] = []

    def wanted(self, sample: int, keys: Sequence[Key]) -> None:
        assert all(len(each) == 3 for each in keys)

    def stays(self, sample: int, epoch: int) -> bool:
        return (sample, epoch) not in self.late

    def let_go(self, key: Key) -> None:
        self.gone.append(key[0])

    def write(self, key: Key, version: bytes, block: int, nbytes: int, written: Callable[[], None]) -> bool:
        assert version == b"1"
        if self.takes:
            self.waiting.append((key[0], written))
        return self.takes

    def finish(self) -> None:
        """What has waited longest is written."""
        self.waiting.pop(0)[1]()


class Kept(Bench):
    """A bench with a tier in memory for ``pages`` copies, and one on disk."""

    def __init__(self, pages: int, limit: int = 10**6, samples: int = 10) -> None:
        self.memory = MemoryTier(pages * PAGE, samples)
        super().__init__(limit, self.memory)
        self.disk = Written()
        self.service.disk = self.disk  # type: ignore[assignment]

    def wanted(self, place: int, ticket: int, sample: int, *paths: str) -> None:
        self.service.want(place, [(ticket, sample, tuple(key(path, SIZE) for path in paths))])

    @property
    def held(self) -> int:
        """Bytes of memory in use."""
        return self.arena.allocated

    def check(self) -> None:
        """Nobody wants anything: what is kept is what is held."""
        assert self.held == sum(space_of(copy.nbytes) for _, copy in self.memory.left()[1]) <= self.memory.budget
        assert self.service.counts()["bytes_ahead"] == 0


def test_what_is_kept_is_there_for_who_wants_it_next() -> None:
    bench = Kept(2)
    bench.want(0, [(number, (key("abc"[number]),)) for number in range(3)])
    for number in range(3):
        bench.finish(number)
    assert bench.held == 3 * PAGE
    bench.service.release(range(3))
    bench.check()
    assert bench.held == 2 * PAGE
    bench.service.want(3, [(10 + number, number, (key("abc"[number]),)) for number in range(3)])
    assert list(bench.told) == [0, 1, 2, 10, 11], "two at once"
    assert (bench.got(10), bench.got(11)) == ([content("a", SIZE)], [content("b", SIZE)])
    assert [source.path for source in bench.pool.under_way.values()] == ["c"]
    bench.service.drop()
    bench.finish(min(bench.pool.under_way))
    bench.check()
    counts = bench.service.counts()
    assert (counts["reads"], counts["memory"]["hits"], counts["memory"]["misses"]) == (4, 2, 4)
    bench.arena.close()


def test_a_copy_that_goes_while_it_is_in_use_stays_until_it_is_released() -> None:
    """The data set has another source for the sample than it had."""
    bench = Kept(1)
    bench.wanted(0, 0, 5, "a")
    bench.finish(0)
    bench.service.release([0])
    bench.wanted(1, 1, 5, "a")
    bench.wanted(2, 2, 5, "b")
    bench.finish(min(bench.pool.under_way))
    assert bench.held == 2 * PAGE
    assert (bench.got(1), bench.got(2)) == ([content("a", SIZE)], [content("b", SIZE)])
    assert bench.service.counts()["bytes_ahead"] == SIZE, "one of them is not the tier's any more"
    bench.service.release([1])
    assert bench.got(1) == [None]
    assert bench.got(2) == [content("b", SIZE)]
    bench.service.release([2])
    bench.check()
    bench.arena.close()


def test_what_comes_when_nobody_wants_it_any_more_is_kept_all_the_same() -> None:
    bench = Kept(1)
    bench.wanted(0, 0, 0, "a")
    bench.wanted(0, 1, 1, "b")
    bench.service.drop()
    bench.finish(0)
    bench.finish(1)
    bench.check()
    bench.told.clear()
    bench.wanted(0, 0, 0, "a")
    assert bench.got(0) == [content("a", SIZE)]
    bench.service.drop()
    bench.check()
    bench.arena.close()


def test_two_reads_of_one_source_at_a_time() -> None:
    """The first is one of a run that was given up; whichever comes last is kept, while both may be in use."""
    for order in ((0, 1), (1, 0)):
        bench = Kept(1)
        bench.wanted(0, 0, 0, "a")
        bench.service.drop()
        bench.wanted(0, 1, 0, "a")
        for number in order:
            bench.finish(number)
            if 1 in bench.told:
                assert bench.got(1) == [content("a", SIZE)]
        bench.service.release([1])
        bench.check()
        bench.arena.close()


def test_what_cannot_be_read_is_not_kept() -> None:
    bench = Kept(5)
    bench.wanted(0, 0, 0, "a")
    bench.finish(0, error=OSError("gone"), version=b"1")
    bench.service.release([0])
    bench.check()
    assert bench.memory.counts()["copies"] == 0
    assert bench.disk.waiting == []
    bench.arena.close()


def test_what_is_kept_does_not_count_against_what_is_read_ahead() -> None:
    bench = Kept(100, limit=2 * SIZE, samples=100)
    bench.wanted(0, 0, 99, "first")
    bench.service.want(1, [(number, number, (key(f"{number}", SIZE),)) for number in range(1, 50)])
    reads = 0
    while bench.pool.under_way:
        assert len(bench.pool.under_way) <= 2
        bench.finish(min(bench.pool.under_way))
        reads += 1
    assert reads == 50, "none of them has been released"
    bench.arena.close()


def test_what_memory_does_not_keep_is_written_and_stays_until_then() -> None:
    bench = Kept(1)
    for number, path in enumerate("abc"):
        bench.wanted(0, number, number, path)
    for number in range(3):
        bench.finish(number, version=b"1")
    assert [path for path, _ in bench.disk.waiting] == ["b", "c"]
    bench.service.release(range(3))
    assert bench.held == 3 * PAGE
    bench.wanted(1, 3, 1, "b")
    assert bench.got(3) == [content("b", SIZE)], "it is there yet"
    bench.disk.finish()
    assert bench.got(3) == [content("b", SIZE)]
    bench.service.drop()
    bench.disk.finish()
    bench.check()
    bench.arena.close()


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("in_use", [True, False])
def test_what_memory_lets_go_of_is_written(in_use: bool, takes: bool) -> None:
    """And stays until then, counted as read ahead."""
    bench = Kept(1)
    bench.wanted(0, 0, 5, "a")
    bench.finish(0, version=b"1")
    bench.disk.takes = takes
    if not in_use:
        bench.service.release([0])
    bench.service._gone(bench.memory.shrink(False, 0))
    assert [path for path, _ in bench.disk.waiting] == ["a"] * takes
    assert bench.service.counts()["bytes_ahead"] == SIZE * (takes or in_use)
    assert bench.held == PAGE * (takes or in_use)
    if in_use:
        assert bench.got(0) == [content("a", SIZE)]
        bench.service.release([0])
    if takes:
        assert bench.held == PAGE
        bench.disk.finish()
    bench.check()
    bench.arena.close()


def test_what_came_from_disk_is_not_written_again() -> None:
    bench = Kept(1)
    bench.wanted(0, 0, 0, "a")
    bench.pool.under_way.clear()
    block, _ = bench.blocks.allocate(SIZE)
    bench.service.done(0, block, SIZE, None, 0.01, on_disk=True)
    bench.service.release([0])
    bench.service._gone(bench.memory.shrink(False, 0))
    assert bench.disk.waiting == []
    bench.check()
    bench.arena.close()


@pytest.mark.parametrize(("takes", "version"), [(False, b"1"), (True, None)])
def test_what_is_not_written_is_released_as_ever(takes: bool, version: bytes | None) -> None:
    """The disk is full, or there is no file whose version it would be."""
    bench = Kept(0)
    bench.disk.takes = takes
    bench.wanted(0, 0, 0, "a")
    bench.finish(0, version=version)
    bench.service.release([0])
    assert bench.disk.waiting == []
    bench.check()
    bench.arena.close()


def test_copies_that_come_from_disk_are_no_reads_but_are_kept() -> None:
    bench = Kept(1)
    bench.wanted(0, 0, 0, "a")
    bench.pool.under_way.clear()
    block, view = bench.blocks.allocate(SIZE)
    view[:] = content("a", SIZE)
    bench.service.done(0, block, SIZE, None, 0.01, on_disk=True)
    bench.service.release([0])
    bench.check()
    assert (bench.service.counts()["reads"], bench.memory.counts()["copies"]) == (0, 1)
    assert [copy.cost for _, copy in bench.memory.left()[1]] == [1.0], "it is worth as much as any other"
    bench.arena.close()


class _Shares:
    """Orders of two shares; one for all, so that they are equal."""

    def order(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.random.default_rng(epoch).permutation(6)[:3]


@half()
@given(st.data())
def test_any_course(data: st.DataObject) -> None:
    """With tiers too every ticket is told once, with its bytes; in the end no memory is held but what is kept."""
    orders = _Shares()
    bench = Kept(data.draw(st.integers(0, 4)), data.draw(st.sampled_from([SIZE, 100 * SIZE])), 6)
    wanted: dict[int, tuple[str, ...]] = {}
    tickets = epochs = 0
    for _ in range(data.draw(st.integers(1, 50))):
        step = data.draw(st.sampled_from(["want", "want", "finish", "finish", "release", "written", "begin", "drop"]))
        if step == "want":
            paths = tuple(data.draw(st.lists(st.sampled_from("abcdef"), max_size=2, unique=True)))
            bench.wanted(tickets, tickets, data.draw(st.integers(-1, 6)), *paths)
            wanted[tickets] = paths
            tickets += 1
        elif step == "finish" and bench.pool.under_way:
            number = data.draw(st.sampled_from(sorted(bench.pool.under_way)))
            error = OSError() if data.draw(st.integers(0, 6)) == 0 else None
            bench.finish(number, error=error, version=data.draw(st.sampled_from([None, b"1"])))
        elif step == "release" and (there := sorted(wanted.keys() & bench.told.keys())):
            number = data.draw(st.sampled_from(there))
            assert {place[3] for place in bench.told[number]} <= set(wanted.pop(number))
            assert bench.got(number) == [content(place[3], SIZE) for place in bench.told[number]]
            bench.service.release([number])
        elif step == "written" and bench.disk.waiting:
            bench.disk.finish()
        elif step == "begin":
            epochs += 1
            bench.service.begin(Begun(epochs, data.draw(st.sampled_from([None, orders])), 2))
            bench.disk.takes = data.draw(st.booleans())
        elif step == "drop":
            bench.service.drop()
            wanted.clear()
    bench.service.release(sorted(bench.told))
    while not wanted.keys() <= bench.told.keys():
        if bench.pool.under_way:
            bench.finish(min(bench.pool.under_way), version=b"1")
        else:
            bench.disk.finish()  # what waits to be written counts as read ahead
        bench.service.release(sorted(bench.told))
    bench.service.drop()
    while bench.pool.under_way:
        bench.finish(min(bench.pool.under_way), version=b"1")
    while bench.disk.waiting:
        bench.disk.finish()
    bench.check()
    bench.arena.close()


def test_a_copy_on_disk_that_is_not_wanted_soon_goes_as_it_is_used() -> None:
    bench = Kept(0)
    bench.disk.late = {(1, 5), (2, 4)}
    bench.service.begin(Begun(5, None, 1))
    for ticket, sample in enumerate((1, 2)):
        bench.wanted(0, ticket, sample, f"{sample}")
    bench.service.begin(Begun(6, None, 1))
    bench.wanted(1, 2, 1, "other")
    for number in range(3):
        block, view = bench.blocks.allocate(SIZE)
        bench.service.done(number, block, len(view), None, 0.01, on_disk=True)
    assert bench.disk.gone == ["1"], "each counts for the epoch that it was wanted in"
    bench.service.drop()
    bench.check()
    bench.arena.close()


def test_a_copy_on_disk_that_nobody_wants_any_more_stays() -> None:
    """What was read ahead for an epoch that has been left is read again."""
    bench = Kept(0)
    bench.disk.late = {(1, 0)}
    bench.wanted(0, 0, 1, "a")
    bench.service.drop()
    block, view = bench.blocks.allocate(SIZE)
    bench.service.done(0, block, len(view), None, 0.01, on_disk=True)
    assert bench.disk.gone == []
    bench.check()
    bench.arena.close()


def test_what_is_not_wanted_soon_is_not_written() -> None:
    bench = Kept(0)
    bench.disk.late = {(1, 0)}
    for sample in range(2):
        bench.wanted(0, sample, sample, f"{sample}")
        bench.finish(sample, version=b"1")
    assert [path for path, _ in bench.disk.waiting] == ["0"]
    bench.disk.finish()
    bench.service.drop()
    bench.check()
    bench.arena.close()


def test_of_what_memory_has_the_copy_on_disk_goes_all_the_same() -> None:
    bench = Kept(1)
    bench.wanted(0, 0, 1, "a")
    bench.finish(0, version=b"1")
    bench.service.release([0])
    bench.disk.late = {(1, 1)}
    bench.service.begin(Begun(1, None, 1))
    bench.wanted(0, 1, 1, "a")
    assert bench.got(1) == [content("a", SIZE)]
    assert bench.disk.gone == ["a"]
    bench.service.drop()
    bench.check()
    bench.arena.close()


def test_what_memory_lets_go_of_is_written_only_if_it_is_wanted_soon() -> None:
    bench = Kept(2, samples=4)
    bench.disk.late = {(0, 0)}
    for sample in range(2):
        bench.wanted(0, sample, sample, f"{sample}")
        bench.finish(sample, version=b"1")
    bench.service.release(range(2))
    bench.service._gone(bench.memory.shrink(False, 0.0))
    assert [path for path, _ in bench.disk.waiting] == ["1"]
    bench.disk.finish()
    bench.check()
    bench.arena.close()
