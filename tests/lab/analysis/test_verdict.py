"""Parts of an epoch and the verdict on planted causes: what it names, how much to change, what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.lab.analysis.breakdown import broken_down, of_ranks, part_rows
from minato_gpu.lab.analysis.preparation import Case
from minato_gpu.lab.analysis.profile import Phase, Profile, Storage
from minato_gpu.lab.analysis.verdict import verdict
from tests.lab.analysis.conftest import a_profile

BATCHES = 40


def phase(batch_s: float, wait_s: float = 0.0) -> Phase:
    """Batches that take so long, alternately a little more and less."""
    each = tuple(batch_s * (1 + 0.01 * (-1) ** number) for number in range(BATCHES))
    return Phase(each, wait_s)


def profile(
    step_s: float = 0.1,
    warm_s: float = 0.1,
    cold_s: float | None = None,
    prepare_s: Sequence[float] = (0.001,) * 200,
    **more: Any,
) -> Profile:
    """One that is bound by its step, but for what is given."""
    phases = {"compute": phase(step_s), "warm": phase(warm_s, max(warm_s - step_s, 0.0))}
    phases["cold"] = phase(warm_s if cold_s is None else cold_s)
    usual: dict[str, Any] = {"loader": "torch", "samples": 3200, "batch_size": 32, "prepare_cpu_share": 1.0}
    usual |= {"loader_s": 0.0, "startup_s": 0.1, "storage": None, "persistent": False, "overlap": False}
    usual |= {"prepare_s": tuple(prepare_s), "step_s": (step_s,) * BATCHES, "phases": phases}
    return a_profile(**{**usual, **more})


def without_cold(made: Profile) -> Profile:
    """The profile, without the phase in which bytes come from storage."""
    return replace(made, phases={name: each for name, each in made.phases.items() if name != "cold"})


# --- parts ------------------------------------------------------------------------------------------------------------

SECONDS = st.floats(1e-6, 1e3)


@given(SECONDS, SECONDS, st.none() | SECONDS, st.floats(0, 10), st.floats(0, 10), st.integers(1, 4))
def test_shares_are_never_negative_and_add_up(
    step_s: float, warm_s: float, cold_s: float | None, transfer_s: float, loader_s: float, ranks: int
) -> None:
    made = profile(step_s, warm_s, cold_s, transfer_s=transfer_s, loader_s=loader_s, ranks=ranks)
    found = broken_down(made)
    assert found is not None
    assert sum(part.share for part in found.parts.values()) == pytest.approx(1.0)
    assert all(part.share >= 0 for part in found.parts.values())
    assert sum(part.seconds for part in found.parts.values()) == pytest.approx(found.batch_s)


def test_each_difference_is_its_part() -> None:
    found = broken_down(profile(0.1, 0.2, 0.4, transfer_s=0.03, loader_s=0.02))
    assert found is not None
    seconds = {part.name: part.seconds for part in found.parts.values()}
    expected = {"compute": 0.1, "transfer": 0.03, "loader": 0.02, "ranks": 0.0, "preparation": 0.05, "fetch": 0.2}
    assert seconds == pytest.approx(expected)
    assert found.parts["fetch"].share == pytest.approx(0.5)
    assert all(part.is_known for part in found.parts.values())


def test_what_other_ranks_cost_is_not_preparation() -> None:
    made = profile(0.1, 0.3, ranks=2)
    waits = replace(made, phases={**made.phases, "warm": phase(0.3, wait_s=0.05)})
    found = broken_down(waits)
    assert found is not None
    assert found.parts["ranks"].share == pytest.approx(0.15 / 0.3)
    assert found.parts["preparation"].share == pytest.approx(0.05 / 0.3)


def test_a_difference_within_its_error_is_noise() -> None:
    made = profile(0.1, 0.101)
    drifts = tuple(0.1 + 0.002 * (number // 10) for number in range(40))  # a drift of 3 % is more than its error
    part = broken_down(replace(made, phases={**made.phases, "warm": Phase(drifts, 0.0)})).parts  # type: ignore[union-attr]
    assert part["preparation"].seconds == pytest.approx(0.003) and not part["preparation"].is_noise
    few = broken_down(replace(made, phases={**made.phases, "warm": Phase((0.1, 0.106), 0.0)})).parts  # type: ignore[union-attr]
    assert few["preparation"].is_noise and few["preparation"].certain == 0.0


def test_batches_that_come_in_rounds_of_workers_are_no_noise() -> None:
    """Two workers of equal speed: every other batch comes with the one before it."""
    made, pairs = profile(0.001, workers=2), (0.2, 0.001) * 5
    found = replace(made, phases={**made.phases, "warm": Phase(pairs, 0.09)})
    part = broken_down(found).parts["preparation"]  # type: ignore[union-attr]
    assert part.share > 0.9 and not part.is_noise


def test_parts_that_were_not_measured_are_said() -> None:
    made = profile()
    found = broken_down(without_cold(made))
    assert found is not None and not found.parts["fetch"].is_known
    assert broken_down(replace(made, phases={"warm": made.phases["warm"]})) is None
    assert broken_down(replace(made, phases={**made.phases, "compute": Phase((), 0.0)})) is None


def test_rows_say_what_is_unknown_and_what_is_noise() -> None:
    made = without_cold(profile(0.1, 0.3))
    alone = {row["part"]: row for row in part_rows(of_ranks([made]))}
    assert all("rank" not in row for row in alone.values()) and "waiting for other ranks" not in alone
    assert alone["compute"]["share"] == pytest.approx(1 / 3) and alone["compute"]["ms_a_batch"] == pytest.approx(100)
    assert alone["fetch stall"]["share"] is alone["fetch stall"]["ms_a_batch"] is None
    few = replace(made, phases={**made.phases, "warm": Phase((0.1, 0.106), 0.0)})
    assert [row["part"] for row in part_rows(of_ranks([few])) if row["noise"]] == ["preparation stall"]
    several = part_rows(of_ranks([replace(made, rank=rank, ranks=2) for rank in range(2)]))
    assert [row["rank"] for row in several if row["part"] == "waiting for other ranks"] == [0, 1]
    assert of_ranks([replace(made, phases={})]) == []


# --- verdicts ---------------------------------------------------------------------------------------------------------

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


def test_nothing_measured_is_no_verdict() -> None:
    assert verdict([]).case == "unknown"
    assert verdict([replace(profile(), phases={})]).case == "unknown"


def test_what_storage_costs_is_not_known() -> None:
    assert "storage was not" in verdict([without_cold(profile())]).sentence
