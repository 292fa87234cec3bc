"""When the reader process tells what has come."""

from __future__ import annotations

from minato_gpu.sources.telling import LATER_S, PLENTY, SOON_S, Telling

PLACE = (4096, 100, 7, "a", 0, None)


def told(*tickets: int, known: int) -> tuple[Telling, list[float | None]]:
    """One that has told ``known`` tickets already, and what it says of each of these."""
    telling = Telling()
    return telling, [telling.add((ticket, (PLACE,)), known + at + 1) for at, ticket in enumerate(tickets)]


def test_at_first_it_is_told_soon() -> None:
    assert told(0, 1, known=0)[1] == [SOON_S, None]


def test_where_plenty_is_known_it_may_take_longer() -> None:
    assert told(900, 901, 902, known=900)[1] == [LATER_S, None, None]


def test_one_that_comes_late_is_told_soon_although_others_wait() -> None:
    """Batches in order may be held up by it."""
    assert told(900, 901, 901 - PLENTY, 901 - PLENTY - 1, 902, known=900)[1] == [LATER_S, None, None, SOON_S, None]


def test_a_loader_that_is_fast_does_not_come_to_the_end_of_what_it_knows() -> None:
    delays = told(*range(400, 500), known=200)[1]
    assert delays[0] == LATER_S
    assert delays[50] == SOON_S
    assert all(delay is None for at, delay in enumerate(delays) if at not in (0, 50))


def test_a_loader_that_needs_what_has_come_does_not_wait_for_more_to_come() -> None:
    """Such as that for the last samples of an epoch."""
    telling, delays = told(900, 901, 902, known=900)
    assert delays == [LATER_S, None, None]
    assert telling.look(700) is None
    assert telling.look(3 + PLENTY - 1) == SOON_S
    assert telling.look(3) is None, "that is known"
    telling.take()
    assert telling.look(0) is None, "nothing is left to be told"


def test_what_is_taken_is_told_once() -> None:
    telling, _ = told(3, 2, known=0)
    taken = telling.take()
    assert taken == [(3, (PLACE,)), (2, (PLACE,))]
    assert telling.take() == []
    assert telling.add((4, ()), 3) == SOON_S, "a timer of its own"
