"""The usual questions: each with the measured point among the others, and what can be verified where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minato_gpu.analysis import questions
from minato_gpu.analysis.profile import Profile
from minato_gpu.analysis.questions import HERE, parsed_range
from minato_gpu.analysis.setting import Setting, Trial
from tests.analysis.conftest import a_profile


@pytest.mark.parametrize("loader", ["torch", "minato_gpu"])
def test_every_question_has_the_measured_point_once(loader: str) -> None:
    profile = a_profile(loader=loader)
    asked = questions.points(profile)
    names = dict.fromkeys(point.question for point in asked)
    assert len(names) == 10
    for name in names:
        some = [point for point in asked if point.question == name]
        measured = [point for point in some if point.measured]
        where_none = ("cache policy" in name, "cache of" in name and loader == "torch")
        assert len(measured) == (0 if any(where_none) else 1), name
        assert all(point.setting.applied(profile).workers >= 1 for point in some)
        assert len({str(point.value) for point in some}) == len(some) > 1


def test_nothing_is_asked_of_what_was_not_seen() -> None:
    names = {point.question for point in questions.points(a_profile(storage=None))}
    assert not any("cache" in name or "storage" in name for name in names)


def test_rows_can_be_shown(profile: Profile) -> None:
    chosen = [point for point in questions.points(profile) if point.question == "workers"]
    rows = questions.answer(profile, draws=2, chosen=chosen)
    assert [row["setting"] for row in rows] == ["1", "2", "4", "8", "16"]
    for row in rows:
        assert row["low_s"] <= row["epoch_s"] <= row["high_s"]
        assert row["times_faster"] == pytest.approx(rows[1]["epoch_s"] / row["epoch_s"])
        assert row["measured"] == ("here" if row["setting"] == "2" else None) and row["verified"] == HERE
    assert rows[2]["times_faster"] == pytest.approx(2, rel=0.06)


def test_what_cannot_be_run_here_is_not_verified(profile: Profile) -> None:
    small = replace(profile, samples=32)
    unlike = [point for point in questions.points(small) if point.verifiable != HERE]
    names = {point.question.split(",")[0].removesuffix(" of this host") for point in unlike}
    assert names == {"cores", "cache policy", "storage rate", "storage latency", "step", "ranks"}
    assert not any(point.measured for point in unlike)


def test_what_was_tried_is_beside_what_was_predicted(profile: Profile) -> None:
    small = replace(profile, samples=32)
    tried = [Trial(Setting(), (1.0, 0.2, 0.3)), Trial(Setting(workers=4), why_not="no time")]
    rows = questions.compared(small, tried, draws=1)
    here = [row for row in rows if row["measured"]]
    assert len(here) > 5 and all(row["measured_s"] == 0.3 and row["spread_s"] == 0.8 for row in here)
    assert all(row["deviation"] == pytest.approx(row["epoch_s"] / 0.3 - 1) for row in here)
    four = next(row for row in rows if (row["question"], row["setting"]) == ("workers", "4"))
    assert four["verified"] == "not tried: no time" and "measured_s" not in four
    as_told = here[0]["epoch_s"]
    rows = questions.compared(small, [Trial(Setting(), (as_told,))], draws=1)
    assert {row["verified"] for row in rows if row["measured"]} == {"run here, in its interval"}
    assert not any("measured_s" in row for row in rows if not row["measured"])


@pytest.mark.parametrize(
    ("text", "whole", "values"),
    [
        ("8", True, (8,)),
        ("1,2,4", True, (1, 2, 4)),
        ("1-16", True, (1, 2, 4, 8, 16)),
        ("3-10", True, (3, 6, 10)),
        ("0-1", False, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        ("0.5", False, (0.5,)),
    ],
)
def test_ranges(text: str, whole: bool, values: tuple[float, ...]) -> None:
    assert parsed_range(text, whole=whole) == pytest.approx(values)


@pytest.mark.parametrize("text", ["", "x", "4-1", "1-2-3", "-1", "0", "1.5", "0-4"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|sense"):
        parsed_range(text, whole=True)
