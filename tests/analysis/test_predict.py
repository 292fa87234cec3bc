"""Predictions against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minato_gpu.analysis import virtual_epochs
from minato_gpu.analysis.predict import Prediction, Predictor
from minato_gpu.analysis.profile import Profile, Storage
from minato_gpu.analysis.setting import Setting
from tests.analysis.conftest import a_profile

PREPARE_S = 0.64  # 128 samples of 10 ms, two workers


def predict(profile: Profile, setting: Setting = Setting(), *, draws: int = 8) -> Prediction:  # noqa: B008 -- frozen
    return Predictor(profile).predict(setting, draws=draws)


def test_as_measured_workers_bound_the_epoch(profile: Profile) -> None:
    found = predict(profile, draws=4)
    assert found.epoch_s == pytest.approx(PREPARE_S, rel=0.04)
    assert found.low_s <= found.epoch_s <= found.high_s
    assert found.first_epoch_s > found.epoch_s + 0.2  # workers have to start


def test_the_same_question_has_the_same_answer(profile: Profile) -> None:
    setting = Setting(workers=3, cache=0.5)
    assert predict(profile, setting, draws=2) == predict(profile, setting, draws=2)


@pytest.mark.parametrize("workers", [1, 4, 8])
def test_workers_that_wait_go_on_scaling(profile: Profile, workers: int) -> None:
    found = predict(profile, Setting(workers=workers), draws=1)
    assert found.epoch_s == pytest.approx(2 * PREPARE_S / workers, rel=0.06)


def test_workers_that_compute_have_no_more_than_their_cores() -> None:
    profile = a_profile(prepare_cpu_share=1.0, cores=2)
    two, four = (predict(profile, Setting(workers=workers), draws=1).epoch_s for workers in (2, 4))
    assert four == pytest.approx(two, rel=0.03)
    assert predict(profile, Setting(cores=1), draws=1).epoch_s == pytest.approx(2 * two, rel=0.05)
    assert predict(profile, Setting(cores=8, workers=8), draws=1).epoch_s == pytest.approx(two / 4, rel=0.1)


def test_a_step_that_computes_takes_cores_from_the_workers() -> None:
    alone = a_profile(prepare_cpu_share=1.0, cores=2, step_s=(0.01,))
    beside = replace(alone, step_cpu_share=1.0)
    assert predict(beside, draws=1).epoch_s > 1.1 * predict(alone, draws=1).epoch_s


def test_a_rate_that_was_measured_comes_out_again() -> None:
    """Whatever the simulation would lose or not: 150 samples a second were measured with two workers, 280 with four."""
    profile = a_profile(scaling=((1, 78.0), (2, 150.0), (4, 280.0)))
    for workers, rate in profile.scaling:
        assert 128 / predict(profile, Setting(workers=workers), draws=1).epoch_s == pytest.approx(rate, rel=0.05)


def test_what_order_costs_is_no_part_of_what_a_slot_takes() -> None:
    """One sample in 64 takes 40 times as long: eight workers lose much of their rate to it, which others need not."""
    uneven = a_profile(samples=256, workers=8, prefetch=1, prepare_s=((0.005,) * 63 + (0.2,)) * 4)
    rate = 256 / predict(uneven, draws=1).epoch_s
    measured = replace(uneven, scaling=((8, rate),))
    assert 8 / rate > 1.5 * 0.00805  # seconds that a slot had for each, where preparing takes 8.05 ms
    assert Predictor(measured).law.cost_s == pytest.approx(0.00805, rel=0.05)
    assert 256 / predict(measured, draws=1).epoch_s == pytest.approx(rate, rel=0.04)


@pytest.mark.parametrize(
    ("change", "longer_s"),
    [({}, 0.0), ({"step_s": (0.1,)}, 0.05), ({"overlap": False}, 0.05)],
    ids=["workers go on", "the step is the epoch", "epochs apart"],
)
def test_what_is_done_between_epochs(profile: Profile, change: dict[str, Any], longer_s: float) -> None:
    """It keeps the consumer 50 ms, in which workers go on if they may."""
    before = replace(profile, **change)
    after = replace(before, between_s=0.05)
    found = predict(after, draws=1).epoch_s - predict(before, draws=1).epoch_s
    assert found == pytest.approx(longer_s, abs=0.012)


def test_a_long_step_is_the_epoch(profile: Profile) -> None:
    found = predict(profile, Setting(step_s=0.1), draws=1)
    assert found.epoch_s == pytest.approx(16 * (0.1 + 1e-4), rel=0.01)
    assert predict(replace(profile, transfer_s=0.02), Setting(step_s=0.1), draws=1).epoch_s == pytest.approx(
        16 * 0.1201, rel=0.01
    )


def test_slow_storage_is_the_epoch_and_a_cache_mends_it(profile: Profile) -> None:
    """10 MB/s: 12.8 MB take 1.28 s, twice what preparing takes."""
    slow = replace(profile, overlap=False, shards=2)  # nothing of an epoch is in memory from the one before
    by_share = [predict(slow, Setting(cache=share, bytes_per_s=1e7, policy="minio"), draws=1) for share in (0.25, 0.5)]
    none = predict(slow, Setting(bytes_per_s=1e7), draws=1)
    assert none.epoch_s == pytest.approx(1.28, rel=0.05) and none.reads == 128
    assert by_share[0].reads == pytest.approx(0.75 * 128, rel=0.1)
    assert by_share[1].epoch_s < by_share[0].epoch_s < none.epoch_s
    full = predict(slow, Setting(cache=1.2, bytes_per_s=1e7), draws=1)
    assert full.reads == pytest.approx(0, abs=8) and full.epoch_s == pytest.approx(PREPARE_S, rel=0.1)
    assert full.first_epoch_s > 1.28


def test_next_use_keeps_more_than_what_came_first(profile: Profile) -> None:
    slow = replace(profile, overlap=False, shards=4)
    reads = {
        policy: predict(slow, Setting(cache=0.25, policy=policy), draws=1).reads
        for policy in ("minio", "next-use", "lru")
    }
    assert reads["next-use"] < reads["minio"] < reads["lru"] or reads["next-use"] < reads["lru"] < reads["minio"]
    assert reads["next-use"] < 0.6 * 128 < reads["minio"]


def test_reading_ahead_hides_latency_which_torchs_workers_wait_for(profile: Profile) -> None:
    """50 ms for each sample: a worker of torch takes 60 ms for one."""
    apart = replace(profile, overlap=False, shards=2)
    ours = predict(apart, Setting(latency_s=0.05), draws=1)
    assert ours.epoch_s < PREPARE_S + 0.15
    torch = predict(apart, Setting(loader="torch", latency_s=0.05), draws=1)
    assert torch.epoch_s == pytest.approx(6 * PREPARE_S, rel=0.1)


def test_torchs_workers_together_get_no_more_than_the_storage_gives(profile: Profile) -> None:
    found = predict(profile, Setting(loader="torch", bytes_per_s=5e6, workers=8), draws=1)
    assert found.epoch_s == pytest.approx(2.56, rel=0.15)


def test_ranks_share_the_samples_the_storage_and_the_cores() -> None:
    profile = a_profile(prepare_cpu_share=1.0, cores=4)
    one, two, four = (predict(profile, Setting(ranks=ranks), draws=1).epoch_s for ranks in (1, 2, 4))
    assert two == pytest.approx(one / 2, rel=0.15)  # two cores for two workers
    assert four > 0.9 * two  # one core for two workers: half the samples, at half the speed


def test_a_slow_rank_holds_up_all() -> None:
    """Of steps that take 10 or 30 ms, one of four ranks has a long one two times in three."""
    profile = a_profile(step_s=(0.05, 0.05, 0.05, 0.15))
    alone = predict(profile, Setting(ranks=1), draws=4).epoch_s
    steps = 32 / 8  # batches of each of four ranks
    found = predict(profile, Setting(ranks=4), draws=4).epoch_s
    assert found > steps * 0.1 and found > 1.15 * alone / 4


def test_what_the_profile_does_not_know_is_refused(profile: Profile) -> None:
    with pytest.raises(ValueError, match="no read was seen"):
        predict(replace(profile, storage=None), Setting(latency_s=0.1))
    with pytest.raises(ValueError, match="cache in memory"):
        predict(profile, Setting(loader="torch", cache=0.5))
    with pytest.raises(ValueError, match="no sample"):
        Predictor(replace(profile, prepare_s=()))


def test_a_long_epoch_goes_on_as_it_went(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_epochs, "MOST", 400)
    long = replace(profile, samples=128_000)
    assert predict(long, draws=1).epoch_s == pytest.approx(1000 * PREPARE_S, rel=0.05)


def test_a_page_cache_that_has_half_is_read_half() -> None:
    storage = Storage(1e7, 1e-4, 1.0, 1e5, 16.0, cached_share=0.5)
    profile = a_profile(storage=storage, overlap=False, shards=2)
    assert predict(profile, draws=1).reads == pytest.approx(64, rel=0.25)
