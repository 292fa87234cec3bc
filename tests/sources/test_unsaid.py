"""What the loader says to its reader process together."""

from __future__ import annotations

from minato_gpu.sources.service import Wanted
from minato_gpu.sources.unsaid import TOGETHER, Unsaid


def tickets(begin: int, count: int) -> list[Wanted]:
    return [(number, number, (("a", number, 10),)) for number in range(begin, begin + count)]


def place(nbytes: int) -> tuple[int, int, int, str, int, int | None]:
    return 4096, nbytes, 7, "a", 0, None


def test_nothing_is_never_due() -> None:
    unsaid = Unsaid()
    assert not unsaid.is_due(0, missing=5)
    unsaid.want(0, [])
    assert not unsaid.is_due(0, missing=5)
    assert unsaid.take() == ([], [])


def test_what_is_wanted_near_the_window_is_said_at_once() -> None:
    unsaid = Unsaid()
    unsaid.want(1000, tickets(1000, 4))
    assert not unsaid.is_due(0, missing=0)
    assert unsaid.is_due(500, missing=0)


def test_what_is_released_is_said_at_once_where_the_window_misses_something() -> None:
    unsaid = Unsaid()
    unsaid.release(0, [place(10)])
    assert not unsaid.is_due(500, missing=0)
    assert unsaid.is_due(500, missing=1)


def test_many_are_due() -> None:
    wanted, released = Unsaid(), Unsaid()
    for number in range(TOGETHER):
        assert not wanted.is_due(0, missing=0)
        assert not released.is_due(0, missing=0)
        wanted.want(1000, tickets(1000 + number, 1))
        released.release(number, [place(10)])
    assert wanted.is_due(0, missing=0)
    assert released.is_due(0, missing=0)


def test_much_memory_is_given_back_soon() -> None:
    unsaid = Unsaid()
    unsaid.release(0, [place(3 << 20)])
    assert not unsaid.is_due(0, missing=0)
    unsaid.release(1, [place(1 << 20)])
    assert unsaid.is_due(0, missing=0)


def test_all_is_said_once_in_order() -> None:
    unsaid = Unsaid()
    unsaid.want(0, tickets(0, 300))
    unsaid.want(300, tickets(300, 5))
    for number in range(3):
        unsaid.release(number, [])
    assert unsaid.take() == ([0, 1, 2], [(0, tickets(0, 300)), (300, tickets(300, 5))])
    assert not unsaid.is_due(400, missing=1), "nothing is left"
    assert unsaid.take() == ([], [])
