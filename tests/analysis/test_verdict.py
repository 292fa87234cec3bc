"""The verdict on planted causes: what it names, how much to change, and what that is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minato_gpu.analysis.profile import Profile, Storage
from minato_gpu.analysis.verdict import Case, verdict
from tests.analysis.planted import phase, profile

DISK = Storage(bytes_per_s=50e6, latency_s=0.0001, requests=1.0, nbytes=1e5, concurrency=2.0, cached_share=0.0)
FAR = Storage(bytes_per_s=1e9, latency_s=0.05, requests=1.0, nbytes=1e5, concurrency=2.0, cached_share=0.0)
TAIL = (0.001,) * 99 + (0.2,)

PLANTED: dict[Case, tuple[Profile, str]] = {
    "step-bound": (profile(0.1, 0.101), "99% of the epoch"),
    # 32 samples of 10 ms: two workers make a batch in 0.16 s, and four one in 0.08 s
    "too few workers": (
        profile(0.1, 0.16, prepare_s=(0.01,) * 200, scaling=((1, 100.0), (2, 200.0))),
        "num_workers=4 keeps up",
    ),
    "too few cores": (
        profile(0.1, 0.64, prepare_s=(0.04,) * 200, cores=2, scaling=((1, 25.0), (2, 50.0))),
        "13 workers of the speed measured, and there are 2 cores",
    ),
    "no workers": (profile(0.1, 0.42, prepare_s=(0.01,) * 200, workers=0), "num_workers=4 prepares them meanwhile"),
    "slow storage": (profile(0.032, 0.032, 0.064, storage=DISK), "keep 50% of the set in memory"),
    "storage latency": (profile(0.1, 0.1, 0.8, storage=FAR), "read 16 at once"),
    "few slow samples": (
        profile(0.1, 0.13, prepare_s=TAIL, scaling=((1, 330.0), (2, 660.0))),
        "One sample in 100 takes 200.0 times",
    ),
    "too few batches in flight": (
        profile(0.1, 0.13, prepare_s=(0.004, 0.006) * 100, prefetch=1, scaling=((1, 200.0), (2, 400.0))),
        "prefetch_factor=2",
    ),
    "collate-bound": (profile(0.1, 0.2, collate_s=0.35, scaling=((1, 84.0), (2, 168.0))), "collate_fn takes 92%"),
    "one lock": (
        profile(0.1, 0.4, collate_s=0.35, scaling=((1, 80.0), (2, 84.0)), worker_kind="thread"),
        "they wait for one lock",
    ),
    "transfer-bound": (profile(0.1, 0.15, transfer_s=0.04), "use pin_memory=True and non_blocking=True"),
    "loader-bound": (profile(0.001, 0.003, loader_s=0.0015), "a batch size of 256 (now 32)"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_it_names_what_to_change_and_by_how_much(case: Case) -> None:
    planted, change = PLANTED[case]
    found = verdict([planted])
    assert found.case == case, found.sentence
    assert change in found.sentence
    assert found.sentence.endswith((".",)) and "\n" not in found.sentence


def test_a_sample_that_is_slow_and_yet_quicker_than_a_step_is_not_to_blame() -> None:
    hiccup = (*((0.004, 0.006) * 100)[1:], 0.03)
    found = verdict([profile(0.1, 0.13, prepare_s=hiccup, prefetch=1, scaling=((1, 200.0), (2, 400.0)))])
    assert found.case == "too few batches in flight"


def test_the_gain_is_the_stall() -> None:
    assert verdict([PLANTED["storage latency"][0]]).gain == pytest.approx(0.7 / 0.8)
    assert verdict([PLANTED["step-bound"][0]]).gain == pytest.approx(0.01, abs=0.002)


def test_as_many_workers_as_the_cores_carry_may_not_be_enough() -> None:
    made = profile(0.1, 0.64, prepare_s=(0.02,) * 200, workers=1, cores=2, scaling=((1, 50.0),))
    found = verdict([made])
    assert found.case == "too few workers"
    assert "num_workers=2, as many as 2 cores carry, is up to 2.0 times as fast" in found.sentence
    assert found.gain == pytest.approx(0.5)


def _rank(number: int, step_s: float, warm_s: float, wait_s: float) -> Profile:
    made = profile(step_s, warm_s, rank=number, ranks=2, scaling=((1, 100.0), (2, 200.0)), prepare_s=(0.01,) * 50)
    return replace(made, phases={"compute": phase(step_s), "warm": phase(warm_s, wait_s), "cold": phase(warm_s)})


def test_a_rank_whose_data_is_late_hides_in_the_others_compute() -> None:
    found = verdict([_rank(0, 0.1, 0.159, 0.0), _rank(1, 0.1, 0.159, 0.059)])
    assert (found.case, found.rank) == ("slow rank", 1)
    assert "37% of what looks like its compute" in found.sentence
    assert "num_workers=4" in found.sentence


def test_a_rank_whose_step_is_slow() -> None:
    found = verdict([_rank(0, 0.1, 0.1, 0.0), _rank(1, 0.2, 0.2, 0.0)])
    assert (found.case, found.rank) == ("slow rank", 1)
    assert "2.0 times as long for a step as rank 0" in found.sentence
    assert found.gain == pytest.approx(0.5)


def test_ranks_that_are_alike_are_not_blamed() -> None:
    found = verdict([_rank(0, 0.1, 0.16, 0.06), _rank(1, 0.1, 0.16, 0.06)])
    assert found.case == "too few workers"


def test_nothing_measured() -> None:
    assert verdict([]).case == "unknown"
    assert verdict([replace(profile(), phases={})]).case == "unknown"


def test_what_storage_costs_is_not_known() -> None:
    made = profile()
    without = {name: each for name, each in made.phases.items() if name != "cold"}
    assert "storage was not" in verdict([replace(made, phases=without)]).sentence
