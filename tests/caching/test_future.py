"""When keys are needed next, against looking for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.caching.future import NEVER, Future
from tests.caching.model import KEYS, epochs_of_keys

steps = st.lists(st.sampled_from(["extend", "forget"]), max_size=8)


def use_after(accesses: list[int], key: int, now: int, start: int) -> int:
    """The first position after ``now`` of the key in ``accesses``, which begin at ``start``."""
    return next((at for at, each in enumerate(accesses, start) if each == key and at > now), NEVER)


@given(epochs_of_keys, steps, st.integers(0, 50), st.lists(st.tuples(st.integers(0, KEYS - 1), st.integers(-3, 60))))
def test_it_is_the_first_use_after_now(
    epochs: list[list[int]], actions: list[str], start: int, asked: list[tuple[int, int]]
) -> None:
    """Whatever was forgotten and added before; of a key, times are asked for in order."""
    future, known, comes = Future(KEYS, start), [], iter(epochs)
    begin = start
    for action in ["extend", *actions]:
        if action == "extend" and (order := next(comes, None)) is not None:
            future.extend(np.array(order, np.int64))
            known.append(order)
        elif action == "forget" and known:
            begin += len(known.pop(0))
            future.forget_epoch()
    accesses = [key for order in known for key in order]
    assert (future.start, future.end, future.epochs) == (begin, begin + len(accesses), len(known))
    assert future.next_use.tolist() == [use_after(accesses, key, -1, begin) for key in range(KEYS)]
    for key, now in sorted(asked, key=lambda each: each[1]):
        assert future.after(key, now) == use_after(accesses, key, now, begin)
    lengths = np.cumsum([0, *map(len, known)]) + begin
    for position in range(begin, future.end):
        assert lengths[future.epoch(position)] <= position < lengths[future.epoch(position) + 1]


def test_a_time_that_was_asked_for_is_over() -> None:
    """Of accesses that come out of order, the later one tells what is needed next."""
    future = Future(2)
    future.extend(np.array([0, 0, 1, 0]))
    assert future.after(0, 1) == 3
    assert future.after(0, 0) == 3


@pytest.mark.parametrize("order", [[0, 2], [-1, 0]])
def test_there_are_no_other_keys(order: list[int]) -> None:
    with pytest.raises(ValueError, match="keys must be from 0 to 1, got"):
        Future(2).extend(np.array(order))
