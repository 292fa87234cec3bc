"""Time is shared out so that all of it is used and none is exceeded; meters leave out what does not count."""

from __future__ import annotations

import pytest

from minato_gpu.analysis.meter import Meter
from minato_gpu.analysis.plan import SHARES, TimeBox, most_batches, settling
from minato_gpu.analysis.profile import Phase


def test_phases_that_take_their_time_use_all_of_it() -> None:
    box, now = TimeBox(100.0, 5.0), 5.0
    for name in SHARES:
        now += box.seconds_for(name, now)
    assert now == pytest.approx(105.0)
    assert box.passed(now) == pytest.approx(1.0)


def test_what_a_phase_leaves_over_goes_to_the_others() -> None:
    box = TimeBox(100.0, 0.0)
    assert box.seconds_for("sight", 0.0) == pytest.approx(20.0)
    assert box.seconds_for("storage", 10.0) == pytest.approx(90.0)
    assert box.seconds_for("warm", 0.0, left_out=frozenset({"cold"})) > box.seconds_for("warm", 0.0)
    assert box.seconds_for("cold", 200.0) == 0.0


def test_four_phases_fit_into_one_epoch() -> None:
    assert most_batches(None) is None
    assert [most_batches(length) for length in (1, 8, 100)] == [2, 2, 25]
    assert [settling(2, most) for most in (None, 25, 2)] == [3, 3, 1]


def test_a_meter_leaves_out_what_settles() -> None:
    meter = Meter()
    for skip in (1, 0):
        meter.begin(skip)
        meter.add(1.0, 2.0, 0.5)
        meter.add(3.0, 4.0, 0.25)
    meter.steps[-1] += 1.0
    assert meter.first_wait == 1.0
    assert meter.phase() == Phase(3, 18.0, 7.0, (7.0, 3.0, 8.0))
    assert meter.cpu_s == pytest.approx(1 / 3)
    assert Meter().phase() == Phase(0, 0.0, 0.0) and Meter().cpu_s == 0.0
