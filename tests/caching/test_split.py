"""Raw bytes or fields: no other split makes a shorter epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.caching.split import Means, Shares, seconds, split

_PART = st.floats(0.01, 10.0)


def _best(means: Means, budget: float, *, keeps_raw: bool) -> float:
    """Of a grid of splits."""
    found = []
    for fields in np.linspace(0, 1, 41):
        room = budget - fields * means.field_bytes
        if room < 0:
            break
        most = min(1 - fields, room / means.raw_bytes) if keeps_raw else 0.0
        found += [seconds(means, Shares(float(fields), float(raw))) for raw in np.linspace(0, most, 11)]
    return min(found)


@given(_PART, _PART, st.floats(0, 1), _PART, _PART, _PART, st.booleans())
def test_none_is_better(
    read: float, prepare: float, saved: float, raw: float, field: float, budget: float, keeps_raw: bool
) -> None:
    means = Means(read, prepare, saved * prepare, raw, field)
    shares = split(means, budget, keeps_raw=keeps_raw)
    assert min(shares) >= 0 and sum(shares) <= 1 + 1e-6
    assert shares.fields * field + shares.raw * raw <= budget * (1 + 1e-6)
    assert keeps_raw or shares.raw == 0
    assert seconds(means, shares) <= _best(means, budget, keeps_raw=keeps_raw) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("means", "budget", "expected"),
    [
        (Means(4.0, 2.0, 1.5, 100, 300), 100, Shares(2 / 9.5, 1 - 6 / 9.5)),  # both take as long
        (Means(4.0, 1.0, 1.0, 100, 300), 20, Shares(0.0, 0.2)),  # reading is what takes time
        (Means(0.0, 2.0, 1.5, 100, 300), 150, Shares(0.5, 0.0)),  # preparing is
        (Means(1.0, 2.0, 0.0, 100, 300), 50, Shares(0.0, 0.5)),  # fields save nothing of it
        (Means(4.0, 2.0, 1.5, 100, 300), 1000, Shares(1.0, 0.0)),  # there is room for all
    ],
)
def test_it_is_what_one_would_choose(means: Means, budget: float, expected: Shares) -> None:
    assert split(means, budget) == pytest.approx(expected)


def test_a_mixture_is_much_better_than_either() -> None:
    """As DESIGN.md says of what a cache saves: adding both savings up, or keeping one kind only, is worse."""
    means = Means(4.0, 2.0, 1.5, 100, 300)
    found = seconds(means, split(means, 100)) / seconds(means, Shares(0, 0))
    assert found == pytest.approx(0.42, abs=0.005)
    assert seconds(means, Shares(0, 1)) / 4 == pytest.approx(0.5)
    assert seconds(means, Shares(1 / 3, 0)) / 4 == pytest.approx(2 / 3)
