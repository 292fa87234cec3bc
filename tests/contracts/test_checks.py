"""The checks that the contract tests rest on notice what they are for."""

from __future__ import annotations

import pytest

from tests.contracts.checks import NOTHING, batch_lateness, differences, lateness


def test_differences() -> None:
    assert differences([1, 2, 2, 3], [2, 3, 1, 2]) == NOTHING
    assert differences([1, 2, 2, 3], [1, 2, 3]) == {"missing": [2], "extra": []}
    assert differences([1, 2], [1, 1, 2, 9]) == {"missing": [], "extra": [1, 9]}


def test_lateness() -> None:
    order = [10, 11, 12, 13, 14, 15]
    assert lateness(order, [[10, 11], [12, 13], [14, 15]], 2) == [0] * 6
    assert lateness(order, [[11, 12], [13, 14], [10, 15]], 2) == [0, -1, 0, -1, 2, 0]


def test_batch_lateness() -> None:
    assert batch_lateness([[1, 2], [3], [4]], [[3], [4], [1, 2]]) == [-1, -1, 2]
    with pytest.raises(ValueError, match="not in"):
        batch_lateness([[1, 2]], [[2, 1]])
