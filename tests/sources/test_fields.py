"""Fields that are kept in memory: what is kept, with reads that a test finishes by hand, and of which samples."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.sources.blocks import ASKED, HEAD, space_of
from minato_gpu.sources.fields import LEARNED, FieldPolicy
from minato_gpu.sources.memory_tier import Begun, MemoryTier
from minato_gpu.sources.sent_samples import SentSample
from minato_gpu.sources.source import FIELDS
from tests.conftest import half
from tests.sources.by_hand import PAGE, SIZE, Kept, content

MS = 1e-3


class Fields(Kept):
    """The bench of what is kept, with fields. ``rate``: of the storage, bytes a second."""

    def __init__(self, pages: int, rate: float = 0.0) -> None:
        super().__init__(pages)
        self.rate = rate
        self.keeping = self.service.fields = FieldPolicy(self.memory, 10, 1, lambda: self.rate)

    def learn(self, saved_s: float = 3 * MS) -> None:
        """What fields of other samples were like."""
        for _ in range(LEARNED):
            self.keeping.observe(SIZE, saved_s, 4 * MS)
        self.service.begin(Begun(0, None, 1))

    def send(self, sample: int, nbytes: int = SIZE) -> None:
        """A worker sends fields: their bytes are the sample's number."""
        file = os.memfd_create("test")
        os.write(file, bytes([sample]) * nbytes)
        self.service.receive(SentSample(sample, 4 * MS, 3 * MS, nbytes=nbytes, file=file))
        os.close(file)

    def asked(self, ticket: int) -> list[int]:
        """Of which samples its worker is to send fields."""
        return [place[4] for place in self.told[ticket] if place[0] == ASKED]

    def fields(self, ticket: int) -> list[bytes | None]:
        """What its worker finds of fields."""
        there = [place for place in self.told[ticket] if place[0] != ASKED]
        return [found for place, found in zip(there, self.got(ticket), strict=True) if place[3] == FIELDS]


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
        assert bench.held >= sum(space_of(copy.nbytes) for copy in bench.memory._copies.values())
        assert int(bench.memory.counts()["bytes"]) <= bench.memory.budget
    bench.service.release([number for number, _ in wanted])
    for number in sorted(bench.pool.under_way):
        bench.finish(number)
    bench.check()


# --- of which samples ------------------------------------------------------------------------------------------

RAW = 4096 - HEAD
FIELD = space_of(3 * 4096 - HEAD)


@pytest.mark.parametrize(("read_s", "all_or_none"), [(0.0, True), (0.1, False)])
def test_what_bounds_the_epoch_decides(read_s: float, all_or_none: bool) -> None:
    """Room for some 30 samples of either kind."""
    choice = FieldPolicy(MemoryTier(10 * FIELD, 1000), 1000, 2, lambda: RAW / read_s if read_s else 0.0)
    for _ in range(LEARNED):
        choice.observe(3 * 4096 - HEAD, 1e-6 if read_s else 3 * MS, 4 * MS)
    choice.choose(RAW)
    assert {choice.wants(sample) for sample in range(1000)} == {all_or_none}
