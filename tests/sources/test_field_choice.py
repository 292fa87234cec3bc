"""Which samples are kept as fields: asked first, then by what an epoch takes."""

from __future__ import annotations

import pytest

from minato_gpu.sources.blocks import space_of
from minato_gpu.sources.field_choice import LEARNED, FieldChoice

MS = 1e-3
FIELD = space_of(3 * 4096)


def learned(budget: int, *, saved_s: float = 3 * MS, prepare_s: float = 4 * MS, workers: int = 2) -> FieldChoice:
    choice = FieldChoice(budget, 1000, workers)
    for _ in range(LEARNED):
        choice.observe(3 * 4096, saved_s, prepare_s)
    return choice


def test_the_first_are_asked_for_and_no_more_than_it_takes() -> None:
    choice = FieldChoice(10**9, 1000, 1)
    asked = [choice.wants(sample) for sample in range(1000)]
    assert asked == [True] * (4 * LEARNED) + [False] * (1000 - 4 * LEARNED)
    choice.choose(4096, 1 * MS, keeps_raw=True)
    assert choice.shares is None, "nothing has been seen"
    assert "raw bytes" in choice.why()


def test_as_many_are_fields_as_the_shares_say() -> None:
    choice = learned(1000 * FIELD // 3)
    choice.choose(FIELD / 3, 4 * MS, keeps_raw=True)
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
    choice = learned(10 * FIELD, saved_s=1e-6 if read_s else 3 * MS)
    choice.choose(FIELD / 3, read_s, keeps_raw=keeps_raw)
    assert {choice.wants(sample) for sample in range(1000)} == {all_or_none}


def test_another_process_knows_what_this_one_does() -> None:
    choice, later = learned(10 * FIELD), FieldChoice(10 * FIELD, 1000, 2)
    later.learned = choice.learned
    for each in (choice, later):
        each.choose(FIELD / 3, 1 * MS, keeps_raw=True)
    assert later.shares == choice.shares is not None
