"""Which samples are kept as fields: asked first, then by what an epoch takes."""

from __future__ import annotations

import pytest

from minato_gpu.sources.blocks import HEAD, space_of
from minato_gpu.sources.field_keeping import LEARNED, FieldKeeping
from minato_gpu.sources.memory_tier import MemoryTier

MS = 1e-3
RAW = 4096 - HEAD
FIELD = space_of(3 * 4096 - HEAD)


def keeping(budget: int, read_s: float = 0.0, workers: int = 2, memory: MemoryTier | None = None) -> FieldKeeping:
    memory = memory or MemoryTier(budget, 1000)
    return FieldKeeping(memory, 1000, workers, lambda: RAW / read_s if read_s else 0.0)


def learned(
    budget: int, read_s: float = 0.0, saved_s: float = 3 * MS, memory: MemoryTier | None = None
) -> FieldKeeping:
    choice = keeping(budget, read_s, memory=memory)
    for _ in range(LEARNED):
        choice.observe(3 * 4096 - HEAD, saved_s, 4 * MS)
    return choice


def test_the_first_are_asked_for_and_no_more_than_it_takes() -> None:
    choice = keeping(10**9, workers=1)
    asked = [choice.wants(sample) for sample in range(1000)]
    assert asked == [True] * (4 * LEARNED) + [False] * (1000 - 4 * LEARNED)
    choice.choose(RAW)
    assert choice.shares is None, "nothing has been seen"
    assert "raw bytes" in choice.why()


def test_as_many_are_fields_as_the_shares_say() -> None:
    choice = learned(1000 * FIELD // 3, 4 * MS)
    choice.choose(RAW)
    assert choice.shares is not None
    fields, raw = choice.shares
    assert 0 < fields < raw
    wanted = sum(choice.wants(sample) for sample in range(1000)) / 1000
    assert wanted == pytest.approx(fields / (fields + raw), abs=0.01)
    assert "reading takes 4.00 ms a sample, preparing 2.00, of which fields save 1.50" in choice.why()


@pytest.mark.parametrize(
    ("read_s", "keeps_raw", "all_or_none"), [(0.0, True, True), (0.0, False, True), (0.1, True, False)]
)
def test_what_bounds_the_epoch_decides(read_s: float, keeps_raw: bool, all_or_none: bool) -> None:
    """Room for some 30 samples of either kind."""
    memory = MemoryTier(10 * FIELD, 1000)
    memory.off_for_files = "" if keeps_raw else "off for files"
    choice = learned(10 * FIELD, read_s, 1e-6 if read_s else 3 * MS, memory)
    choice.choose(RAW)
    assert {choice.wants(sample) for sample in range(1000)} == {all_or_none}


def test_another_process_knows_what_this_one_does() -> None:
    memory = MemoryTier(10 * FIELD, 1000)
    choice = learned(10 * FIELD, 1 * MS, memory=memory)
    choice.choose(RAW)
    later = keeping(10 * FIELD, memory=memory)
    later.choose(RAW)
    assert later.shares == choice.shares is not None
