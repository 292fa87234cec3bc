"""Fields in the tier in memory, with reads that a test finishes by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.sources.blocks import ASKED, space_of
from minato_gpu.sources.field_keeping import LEARNED, FieldKeeping
from minato_gpu.sources.memory_tier import Begun
from minato_gpu.sources.source import FIELDS, fields_key
from tests.sources.by_hand import SIZE, content
from tests.sources.test_service_tiers import PAGE, Kept
from tests.support.examples import half

MS = 1e-3


class Fields(Kept):
    """The bench of what is kept, with fields. ``rate``: of the storage, bytes a second."""

    def __init__(self, pages: int, samples: int = 10, rate: float = 0.0) -> None:
        super().__init__(pages, samples=samples)
        self.rate = rate
        self.keeping = self.service.fields = FieldKeeping(self.memory, samples, 1, lambda: self.rate)

    def learn(self, saved_s: float = 3 * MS) -> None:
        """What fields of other samples were like."""
        for _ in range(LEARNED):
            self.keeping.observe(SIZE, saved_s, 4 * MS)
        self.service.begin(Begun(0, None, 1))

    def send(self, sample: int, nbytes: int = SIZE) -> None:
        """A worker sends fields: their bytes are the sample's number."""

        def fill(view: memoryview) -> None:
            view[:] = bytes([sample]) * nbytes

        self.service.receive(sample, nbytes, 3 * MS, 4 * MS, fill)

    def asked(self, ticket: int) -> list[int]:
        """Of which samples its worker is to send fields."""
        return [place[4] for place in self.told[ticket] if place[0] == ASKED]

    def fields(self, ticket: int) -> list[bytes | None]:
        """What its worker finds of fields."""
        there = [place for place in self.told[ticket] if place[0] != ASKED]
        return [found for place, found in zip(there, self.got(ticket), strict=True) if place[3] == FIELDS]


def test_fields_that_were_asked_for_are_there_the_next_time() -> None:
    bench = Fields(4)
    bench.learn()
    bench.wanted(0, 0, 3, "a")
    bench.finish(0)
    assert bench.asked(0) == [3]
    assert bench.memory.counts()["copies"] == 0, "raw bytes are not kept of it"
    bench.send(3)
    bench.service.release([0])
    bench.wanted(1, 1, 3, "a")
    assert bench.fields(1) == [bytes([3]) * SIZE] and len(bench.told[1]) == 1
    assert not bench.pool.under_way
    counts = bench.memory.counts()
    assert (counts["hits"], counts["misses"], counts["fields"]) == (1, 1, 1)
    bench.service.release([1])
    bench.check()


def test_of_a_sample_with_two_sources_both_are_saved() -> None:
    bench = Fields(8)
    bench.learn()
    bench.wanted(0, 0, 3, "a", "b")
    bench.finish(0)
    bench.finish(1)
    assert bench.asked(0) == [3]
    bench.send(3)
    bench.service.release([0])
    bench.wanted(1, 1, 3, "a", "b")
    assert len(bench.told[1]) == 1 and not bench.pool.under_way
    assert bench.memory.counts()["hits"] == 2
    bench.service.release([1])
    bench.check()


def test_raw_bytes_make_room_for_the_fields_of_their_sample() -> None:
    bench = Fields(4)
    bench.keeping.wants = lambda sample: False  # type: ignore[method-assign]
    bench.wanted(0, 0, 3, "a", "b")
    bench.finish(0)
    bench.finish(1)
    bench.service.release([0])
    assert bench.memory.counts()["copies"] == 2
    bench.keeping.wants = lambda sample: True  # type: ignore[method-assign]
    bench.wanted(1, 1, 3, "a", "b")
    assert bench.got(1)[:2] == [content("a", SIZE), content("b", SIZE)] and bench.asked(1) == [3]
    bench.send(3)
    assert bench.memory.counts()["copies"] == bench.memory.counts()["fields"] == 1
    assert bench.got(1)[:2] == [content("a", SIZE), content("b", SIZE)], "still in use"
    bench.service.release([1])
    bench.check()


def test_where_reading_is_what_takes_time_raw_bytes_take_their_place() -> None:
    bench = Fields(4, samples=4)
    bench.learn()
    for sample in range(4):
        bench.wanted(sample, sample, sample, f"{sample}")
        bench.finish(sample)
        bench.send(sample)
        bench.service.release([sample])
    assert bench.memory.counts()["fields"] == 4
    bench.rate = 1.0
    for _ in range(1000):
        bench.keeping.observe(40 * PAGE, 0.0, 4 * MS)  # fields have become large, and save nothing more
    bench.service.begin(Begun(1, None, 1))
    assert bench.memory.counts()["fields"] == 0
    for sample in range(4):
        bench.wanted(4 + sample, 4 + sample, sample, f"{sample}")
        bench.finish(4 + sample)
        assert not bench.asked(4 + sample)
        bench.service.release([4 + sample])
    assert bench.memory.counts()["copies"] == 4
    bench.check()


def test_fields_for_which_there_is_no_room_are_not_kept() -> None:
    bench = Fields(1)
    bench.learn()
    bench.wanted(0, 0, 1, "a")
    bench.finish(0)
    bench.service.release([0])
    bench.send(1)
    bench.send(2)
    bench.send(3, nbytes=10 * PAGE)
    assert bench.memory.counts()["copies"] == 1 and bench.memory.holds(fields_key(1))
    bench.send(1)
    bench.check()


def test_of_a_sample_that_is_no_sample_nothing_is_kept() -> None:
    bench = Fields(4)
    bench.learn()
    bench.wanted(0, 0, -1, "a")
    bench.finish(0)
    assert not bench.asked(0)
    bench.service.release([0])
    for sample in (-1, 10):
        bench.send(sample % 256 if sample < 0 else sample)
    bench.check()


@pytest.mark.parametrize("rate", [0.0, 1e4])
@half()
@given(data=st.data())
def test_any_course(rate: float, data: st.DataObject) -> None:
    bench = Fields(data.draw(st.integers(0, 6)), rate=rate)
    ticket = 0
    wanted: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        act = data.draw(st.sampled_from(["want", "finish", "release", "send", "begin", "learn"]))
        if act == "want":
            sample = data.draw(st.integers(0, 9))
            bench.wanted(ticket, ticket, sample, f"{sample}", *([f"{sample}b"] if sample % 2 else []))
            wanted.append((ticket, sample))
            ticket += 1
        elif act == "finish" and bench.pool.under_way:
            bench.finish(data.draw(st.sampled_from(sorted(bench.pool.under_way))))
        elif act == "release" and wanted:
            bench.service.release([wanted.pop(data.draw(st.integers(0, len(wanted) - 1)))[0]])
        elif act == "send":
            bench.send(data.draw(st.integers(0, 9)), data.draw(st.sampled_from([SIZE, 2 * PAGE])))
        elif act == "begin":
            bench.service.begin(Begun(0, None, 1))
        elif act == "learn":
            bench.learn(data.draw(st.sampled_from([0.0, 3 * MS])))
        for number, sample in wanted:
            if number in bench.told:
                found = bench.got(number)
                fields = bench.fields(number)
                assert fields in ([], [bytes([sample]) * len(fields[0] or b"")] if fields else [])
                raw = {content(f"{sample}", SIZE), content(f"{sample}b", SIZE)}
                assert set(found) - set(fields) <= raw
        assert bench.held >= sum(space_of(copy.nbytes) for _, copy in bench.memory.left()[1])
        assert int(bench.memory.counts()["bytes"]) <= bench.memory.budget
    bench.service.release([number for number, _ in wanted])
    for number in sorted(bench.pool.under_way):
        bench.finish(number)
    bench.check()
