"""An epoch in other settings: predictions against what can be worked out by hand, and the questions that are asked."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from minato_gpu.lab.analysis.predict import AS_MEASURED, Predictor, answer
from minato_gpu.lab.analysis.profile import Setting, Storage
from tests.lab.analysis.conftest import a_profile

PREPARE_S = 0.64  # 128 samples of 10 ms, two workers
COMPUTES: dict[str, Any] = {"prepare_cpu_share": 1.0, "cores": 2}
APART: dict[str, Any] = {"overlap": False, "shards": 2}  # nothing of an epoch is in memory from the one before
RATES: dict[str, Any] = {"scaling": ((1, 78.0), (2, 150.0), (4, 280.0))}  # samples per second of so many workers
CROWDED: dict[str, Any] = {"scaling": ((1, 100.0), (2, 190.0), (4, 195.0))}
HALF_CACHED = Storage(5e6, 1e-4, 1.0, 1e5, 16.0, cached_share=0.5)
LONG_STEP: dict[str, Any] = {"step_s": (0.1,)}
NO_WORKERS: dict[str, Any] = {"workers": 0, "storage": None, **LONG_STEP}


class Known(NamedTuple):
    """``epoch_s``: what comes out for a profile with these changes in this setting."""

    epoch_s: float
    setting: Setting = AS_MEASURED
    changes: dict[str, Any] = {}  # noqa: RUF012 -- nobody changes them
    within: float = 0.06


KNOWN: dict[str, Known] = {
    "workers bound the epoch": Known(PREPARE_S),
    "one worker has all the work": Known(2 * PREPARE_S, Setting(workers=1)),
    "workers that wait go on scaling": Known(PREPARE_S / 4, Setting(workers=8)),
    "workers that compute have no more than their cores": Known(PREPARE_S, Setting(workers=4), COMPUTES),
    "a step that computes takes cores": Known(
        0.73, AS_MEASURED, {**COMPUTES, "step_s": (0.01,), "step_cpu_share": 1.0}
    ),
    "a rate that was measured, 1": Known(128 / 78, Setting(workers=1), RATES),
    "a rate that was measured, 4": Known(128 / 280, Setting(workers=4), RATES),
    "a rate that was measured, beyond the cores": Known(128 / 195, Setting(workers=4), {**COMPUTES, **CROWDED}),
    "a long step is the epoch": Known(1.6016, AS_MEASURED, LONG_STEP, 0.01),
    "without workers a step waits for its batch": Known(
        2 * PREPARE_S + 16 * 0.1001, AS_MEASURED, {**NO_WORKERS, "loader": "torch"}, 0.01
    ),
    "this loader without workers": Known(2 * PREPARE_S + 16 * 0.1001, AS_MEASURED, NO_WORKERS, 0.01),
    "a step waits for its batch's transfer": Known(16 * 0.1201, AS_MEASURED, {**LONG_STEP, "transfer_s": 0.02}, 0.01),
    "slow storage is the epoch": Known(1.28, Setting(bytes_per_s=1e7), APART),
    "a cache mends it": Known(PREPARE_S, Setting(bytes_per_s=1e7, cache=1.2), APART, 0.1),
    "a page cache that has half": Known(1.28, AS_MEASURED, {**APART, "storage": HALF_CACHED}, 0.15),
    "reading ahead hides latency": Known(PREPARE_S + 0.07, Setting(latency_s=0.05), APART, 0.1),
    "torch's workers wait for latency": Known(6 * PREPARE_S, Setting(loader="torch", latency_s=0.05), APART, 0.1),
    "torch's workers share the storage": Known(2.56, Setting(loader="torch", bytes_per_s=5e6, workers=8), {}, 0.15),
}


def _seconds(setting: Setting = AS_MEASURED, **changes: Any) -> float:
    """Seconds of an epoch, from one draw: what is asked, not how sure it is."""
    return Predictor(a_profile(**changes)).predict(setting, draws=1).epoch_s


@pytest.mark.parametrize("name", KNOWN)
def test_what_can_be_worked_out_comes_out(name: str) -> None:
    known = KNOWN[name]
    assert _seconds(known.setting, **known.changes) == pytest.approx(known.epoch_s, rel=known.within)


def test_what_order_costs_is_no_part_of_what_a_slot_takes() -> None:
    """One sample in 64 takes 40 times as long: eight workers lose much of their rate to it, which others need not."""
    uneven: dict[str, Any] = {"samples": 256, "workers": 8, "prefetch": 1, "prepare_s": ((0.005,) * 63 + (0.2,)) * 4}
    rate = 256 / Predictor(a_profile(**uneven)).predict().epoch_s
    assert 8 / rate > 1.5 * 0.00805  # seconds that a slot had for each, where preparing takes 8.05 ms
    again = Predictor(a_profile(**uneven, scaling=((8, rate),))).predict().epoch_s
    assert 256 / again == pytest.approx(rate, rel=0.08)


def test_a_cache_that_keeps_more_is_faster() -> None:
    none, quarter, half = (
        _seconds(Setting(bytes_per_s=5e6, cache=cache), overlap=False, shards=4) for cache in (None, 0.25, 0.5)
    )
    assert half < quarter < none


def test_the_questions_have_the_measured_point_once_and_say_what_cannot_be_run_here() -> None:
    found = answer(a_profile(samples=32), draws=1)
    names = dict.fromkeys(row["question"] for row in found)
    stored = {"cache of this loader, share of the set", "storage rate, MB/s", "storage latency, ms"}
    assert names.keys() == {"workers", "loader"} | stored
    for name in names:
        some = [row for row in found if row["question"] == name]
        assert len([row for row in some if row["measured"]]) == 1, name
        assert len({row["setting"] for row in some}) == len(some) > 1
    assert all(row["low_s"] <= row["epoch_s"] <= row["high_s"] and row["times_faster"] > 0 for row in found)
    assert {row["question"] for row in found if row["verified"] == "not verifiable here"} == stored
    assert {row["question"] for row in answer(a_profile(samples=32, storage=None), draws=1)} == {"workers", "loader"}
