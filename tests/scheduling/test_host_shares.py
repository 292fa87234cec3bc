"""Shares of a host's cores: to the rank that has least ready, and never none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.scheduling.host_shares import Need, shares

NEEDS = st.lists(st.builds(Need, st.floats(0, 16), st.integers(1, 16)), min_size=1, max_size=8)


@given(NEEDS, st.integers(1, 64))
def test_each_has_one_at_least_and_no_more_than_it_can_use(needs: list[Need], cores: int) -> None:
    found = shares(needs, cores)
    assert all(1 <= mine <= need.most for mine, need in zip(found, needs, strict=True))
    assert sum(found) <= max(cores, len(needs)) + len(needs) - 1


@given(NEEDS, st.integers(1, 64))
def test_who_has_less_ready_is_not_given_fewer(needs: list[Need], cores: int) -> None:
    found = shares(needs, cores)
    for mine, need in zip(found, needs, strict=True):
        for other, more in zip(found, needs, strict=True):
            if need.ready < more.ready:
                assert mine >= min(other, need.most)


@given(NEEDS, st.integers(1, 64))
def test_no_core_is_left_that_somebody_could_use(needs: list[Need], cores: int) -> None:
    found = shares(needs, cores)
    assert sum(found) >= min(cores, sum(need.most for need in needs))


def test_in_order_of_need() -> None:
    assert shares([Need(2.0, 4), Need(0.5, 4), Need(1.0, 4)], 8) == [1, 4, 4]
    assert shares([Need(2.0, 4), Need(0.5, 4), Need(1.0, 4)], 6) == [1, 4, 2]
