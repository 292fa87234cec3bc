"""What the reader process does between the loader and the pool: what is told, what stays for later epochs and what is
written to disk, with a pool and a disk that a test finishes by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.caching.future import Integers
from minato_gpu.sources.memory_tier import Begun, OfItems
from tests.conftest import half
from tests.sources.by_hand import PAGE, SIZE, Bench, Kept, content, key


def test_reads_stay_below_the_limit_but_for_the_oldest_place() -> None:
    bench = Bench(limit=3 * SIZE)
    wanted = [key(f"{number}", SIZE) for number in range(8)]
    bench.want(0, [(number, (wanted[number],)) for number in range(4)])
    bench.want(4, [(number, (wanted[number],)) for number in range(4, 8)])
    assert list(bench.pool.under_way) == [0, 1, 2, 3], "the oldest place must be complete some time"
    for number in range(4):
        bench.finish(number)
    bench.service.release([1])
    assert not bench.pool.under_way
    bench.service.release([2, 3])
    assert list(bench.pool.under_way) == [4, 5], "two more, beside the one that is there"
    bench.service.release([0])
    assert list(bench.pool.under_way) == [4, 5, 6, 7]


def test_a_new_run_gets_nothing_of_the_old_one() -> None:
    bench = Bench()
    bench.want(0, [(0, (key("a"),)), (1, (key("b"),))])
    bench.finish(0)
    bench.service.drop()
    assert bench.pool.cancelled == [1]
    bench.told.clear()
    bench.want(0, [(1, (key("c"),))])
    bench.finish(1)
    assert bench.told == {}, "what has come is the old ticket's"
    bench.finish(2)
    assert bench.got(1) == [content("c", SIZE)]
    bench.service.release([1])
    assert bench.arena.allocated == 0


# --- what is kept ------------------------------------------------------------------------------------------------


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


class Rotated:
    """Orders of ``keys`` samples: epoch 1 begins with sample 2."""

    def __init__(self, keys: int) -> None:
        self.keys = keys

    def order(self, epoch: int) -> Integers:
        return np.roll(np.arange(self.keys), -epoch - 1)


def test_what_was_missed_before_the_policy_changed_is_not_taken_for_over() -> None:
    """Its read ends in the next epoch, where it is needed first of all."""
    bench = Kept(2, samples=4)
    bench.service.begin(Begun(0, None, 1))
    for sample in range(3):
        bench.wanted(sample, sample, sample, f"{sample}")
    bench.finish(0)
    bench.finish(1)
    bench.service.begin(Begun(1, Rotated(4), 2))
    bench.wanted(3, 3, 2, "2")
    assert bench.memory.counts()["policy"] == "next-use"
    bench.finish(2)
    assert {copy.key[0] for copy in bench.memory._copies.values()} == {"2", "0"}, "1 is needed last"


def test_orders_of_items_follow_those_of_samples() -> None:
    assert OfItems(Rotated(5), 4, 1).order(0) is None, "of another data set"
    orders = OfItems(Rotated(5), 5, 2).order(0)
    assert orders is not None and orders.tolist() == [1, 6, 2, 7, 3, 8, 4, 9, 0, 5]


def test_what_was_read_is_written_and_stays_until_then() -> None:
    bench = Kept(1)
    for number, path in enumerate("abc"):
        bench.wanted(0, number, number, path)
    for number in range(3):
        bench.finish(number, version=b"1")
    assert [path for path, _ in bench.disk.waiting] == ["a", "b", "c"]
    bench.disk.finish()
    bench.service.release(range(3))
    assert bench.held == 3 * PAGE
    bench.wanted(1, 3, 1, "b")
    assert bench.got(3) == [content("b", SIZE)], "it is there yet"
    bench.disk.finish()
    assert bench.got(3) == [content("b", SIZE)]
    bench.service.drop()
    bench.disk.finish()
    bench.check()


def test_a_copy_on_disk_that_is_not_wanted_soon_goes_as_it_is_used() -> None:
    bench = Kept(0)
    bench.disk.late = {(1, 5), (2, 4)}
    bench.service.begin(Begun(5, None, 1))
    for ticket, sample in enumerate((1, 2)):
        bench.wanted(0, ticket, sample, f"{sample}")
    bench.service.begin(Begun(6, None, 1))
    bench.wanted(1, 2, 1, "other")
    for number in range(3):
        bench.from_disk(number)
    assert bench.disk.gone == ["1"], "each counts for the epoch that it was wanted in"
    bench.service.drop()
    bench.check()


class _Shares:
    """Orders of two shares; one for all, so that they are equal."""

    def order(self, epoch: int) -> Integers:
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
            nbytes = data.draw(st.sampled_from([SIZE, SIZE, 0, 5 * PAGE]))
            bench.finish(number, nbytes, error, data.draw(st.sampled_from([None, b"1"])))
        elif step == "release" and (there := sorted(wanted.keys() & bench.told.keys())):
            number = data.draw(st.sampled_from(there))
            assert {place[3] for place in bench.told[number]} <= set(wanted.pop(number))
            assert bench.got(number) == [content(place[3], place[1]) for place in bench.told[number]]
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


def test_what_is_wanted_again_much_later_does_not_stay_until_then() -> None:
    """A small set of large samples, whose next epoch is known: it would stay in memory as a whole."""
    bench = Bench(limit=3 * SIZE)
    for epoch in range(3):
        for sample in range(10):
            number = 10 * epoch + sample
            bench.want(number, [(number, (key(f"{sample}", SIZE),))])
    for number in range(30):
        while number not in bench.told:
            bench.finish(min(bench.pool.under_way))
        assert bench.got(number) == [content(f"{number % 10}", SIZE)]
        assert bench.service.counts()["bytes_ahead"] <= 4 * SIZE
        bench.service.release([number])
    assert bench.service.counts()["reads"] == 30
    assert bench.arena.allocated == 0


def test_a_copy_on_disk_that_nobody_wants_any_more_stays() -> None:
    """What was read ahead for an epoch that has been left is read again."""
    bench = Kept(0)
    bench.disk.late = {(1, 0)}
    bench.wanted(0, 0, 1, "a")
    bench.service.drop()
    bench.from_disk(0)
    assert bench.disk.gone == []
    bench.check()
