"""Second requests follow what they bring, and stop where the storage says that it is asked too much."""

from __future__ import annotations

from minato_gpu.sources.hedging import Hedging

_REQUESTS = 4000


def second_requests(*, won: bool) -> int:
    """How many are sent where each of them is answered first, or none is."""
    hedging, sent = Hedging(), 0
    for number in range(_REQUESTS):
        hedging.finished(0.05)
        if hedging.allows(float(number)):
            sent += 1
            hedging.hedged(won=won)
    return sent


def test_as_many_as_are_allowed_where_they_are_answered_first() -> None:
    assert 0.045 * _REQUESTS <= second_requests(won=True) <= 0.055 * _REQUESTS


def test_hardly_any_where_they_never_are() -> None:
    """A storage that only queues answers the first request first."""
    assert 4 <= second_requests(won=False) <= 24


def test_none_while_the_storage_is_asked_too_much() -> None:
    hedging = Hedging()
    assert hedging.allows(0.0)
    hedging.refused(1.0)
    assert not hedging.allows(1.5)
    assert hedging.allows(7.0)


def test_nothing_is_slow_before_something_is_known() -> None:
    hedging, patience = Hedging(), []
    for _ in range(32):
        hedging.finished(0.05)
        patience.append(hedging.patience_s)
    assert patience[:-1] == [None] * 31 and (patience[-1] or 0.0) > 0.05
