"""The scalability law."""

from __future__ import annotations

import pytest

from minato_gpu.analysis.scaling import Law, fit


@pytest.mark.parametrize("law", [Law(0.01), Law(0.01, 0.1), Law(0.02, 0.05, 0.01)])
def test_a_law_is_found_in_its_own_points(law: Law) -> None:
    workers = [1.0, 2.0, 4.0, 8.0]
    found = fit(workers, [law.slot_s(each) for each in workers])
    assert (found.cost_s, found.contention, found.crosstalk) == pytest.approx(
        (law.cost_s, law.contention, law.crosstalk), rel=1e-6, abs=1e-9
    )
    assert law.rate(4) == pytest.approx(4 / law.slot_s(4))


def test_no_part_of_a_law_is_below_zero() -> None:
    """More workers that do better each: that is noise, not a law."""
    found = fit([1, 2, 4], [0.011, 0.010, 0.009])
    assert found.contention == found.crosstalk == 0 and found.cost_s == pytest.approx(0.01, rel=0.1)


def test_one_point_tells_a_cost_alone() -> None:
    assert fit([2], [0.02]).cost_s == pytest.approx(0.02) and fit([2], [0.02]).contention == 0.0
    with pytest.raises(ValueError, match="positive"):
        fit([], [])
    with pytest.raises(ValueError, match="positive"):
        fit([1], [0.0])
