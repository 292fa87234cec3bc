"""Profiles: plain data and back, and how fast bytes can come."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from minato_gpu.analysis.profile import Phase, Profile, Storage, profile_from

STORAGE = Storage(bytes_per_s=1e8, latency_s=0.05, requests=1.0, nbytes=1e5, concurrency=10.0, cached_share=0.25)
PROFILE = Profile(
    loader="torch",
    samples=1001,
    batch_size=10,
    workers=2,
    prefetch=2,
    in_order=True,
    max_lateness=0,
    rank=0,
    ranks=1,
    cores=2,
    prepare_s=(0.01, 0.02),
    prepare_cpu_share=1.0,
    collate_s=0.001,
    step_s=(0.1, 0.11),
    transfer_s=0.0,
    loader_s=1e-4,
    startup_s=0.2,
    storage=STORAGE,
    scaling=((1, 90.0), (2, 170.0)),
    phases={"warm": Phase(10, 1.0, 0.2, (0.1, 0.2))},
)


def test_a_profile_comes_back_from_a_file() -> None:
    assert profile_from(json.loads(json.dumps(asdict(PROFILE)))) == PROFILE
    assert PROFILE.batches == 101


def test_a_profile_of_an_older_version_is_read() -> None:
    """It has what nothing measured."""
    old = json.loads(json.dumps(asdict(PROFILE))) | {"device_s": None}
    old["storage"] |= {"tail": 0.0, "tail_times": 10.0}
    assert profile_from(old) == PROFILE


def test_what_is_no_profile_is_refused() -> None:
    with pytest.raises(TypeError, match="missing"):
        profile_from({"loader": "torch"})


@pytest.mark.parametrize(("at_once", "seconds"), [(10.0, 0.005), (100.0, 0.001), (0.0, 0.05)])
def test_storage_is_bound_by_latency_or_by_its_rate(at_once: float, seconds: float) -> None:
    assert replace(STORAGE, concurrency=at_once).seconds_per_sample() == pytest.approx(seconds)
