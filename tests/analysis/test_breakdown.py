"""Parts of an epoch: they add up, differences are what they are said to be, and noise is called noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.analysis.breakdown import broken_down, mean_of, of_ranks, part_rows
from minato_gpu.analysis.profile import Phase
from tests.analysis.planted import phase, profile

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
    noisy = replace(made, phases={name: phase(each.batch_s[0], spread=0.0) for name, each in made.phases.items()})
    assert broken_down(noisy).parts["preparation"].certain > 0  # type: ignore[union-attr]
    drifts = tuple(0.1 + 0.002 * (number // 10) for number in range(40))
    noisy = replace(made, phases={**made.phases, "warm": Phase(40, sum(drifts), 0.0, drifts)})
    found = broken_down(noisy)
    assert found is not None
    part = found.parts["preparation"]
    assert part.name == "preparation" and part.seconds == pytest.approx(0.003)
    assert not part.is_noise  # a drift of 3 % is more than its error
    few = replace(made, phases={**made.phases, "warm": Phase(2, 0.206, 0.0, (0.1, 0.106))})
    assert broken_down(few).parts["preparation"].is_noise  # type: ignore[union-attr]
    assert broken_down(few).parts["preparation"].certain == 0.0  # type: ignore[union-attr]


def test_what_was_not_measured_is_said() -> None:
    made = profile()
    without = {name: each for name, each in made.phases.items() if name != "cold"}
    found = broken_down(replace(made, phases=without))
    assert found is not None and not found.parts["fetch"].is_known
    assert broken_down(replace(made, phases={"warm": made.phases["warm"]})) is None
    assert broken_down(replace(made, phases={**made.phases, "compute": Phase(0, 0.0, 0.0)})) is None


def test_rows_say_what_is_unknown_and_what_is_noise() -> None:
    made = profile(0.1, 0.3)
    made = replace(made, phases={name: each for name, each in made.phases.items() if name != "cold"})
    alone = {row["part"]: row for row in part_rows(of_ranks([made]))}
    assert all("rank" not in row for row in alone.values()) and "waiting for other ranks" not in alone
    assert alone["compute"]["share"] == "33.3%" and alone["compute"]["ms a batch"].startswith("100.00 ± ")
    assert alone["fetch stall"]["share"] == alone["fetch stall"]["ms a batch"] == "unknown"
    few = replace(made, phases={**made.phases, "warm": Phase(2, 0.206, 0.0, (0.1, 0.106))})
    assert [row["part"] for row in part_rows(of_ranks([few])) if row[""] == "within the noise"] == ["preparation stall"]
    several = part_rows(of_ranks([replace(made, rank=rank, ranks=2) for rank in range(2)]))
    assert [row["rank"] for row in several if row["part"] == "waiting for other ranks"] == ["0", "1"]
    assert of_ranks([replace(made, phases={})]) == []


def test_bursts_of_batches_have_no_large_error() -> None:
    bursts = [0.0, 0.0, 0.0, 0.4] * 25
    assert mean_of(bursts).value == pytest.approx(0.1)
    assert mean_of(bursts).error < 0.02
    assert mean_of([]) == (0.0, 0.0)
    assert mean_of([0.5]) == (0.5, 0.5)
