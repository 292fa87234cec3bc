"""The record of what has been delivered, against a plain set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.samples import Position, Ticket
from minato_gpu.sampling.delivered import HISTORY, DeliveredPositions


def _spans(positions: list[int]) -> list[tuple[int, int]]:
    """The positions as spans, neighbours joined, in the order given."""
    out: list[tuple[int, int]] = []
    for position in positions:
        if out and out[-1][1] == position:
            out[-1] = (out[-1][0], position + 1)
        else:
            out.append((position, position + 1))
    return out


def _set(record: DeliveredPositions) -> set[int]:
    return set(range(record.low)) | {position for lo, hi in record.above for position in range(lo, hi)}


_ORDERS = st.permutations(range(40)).flatmap(lambda order: st.tuples(st.just(order), st.integers(1, 7)))


@given(_ORDERS)
def test_any_order_of_delivery(case: tuple[list[int], int]) -> None:
    order, size = case
    record = DeliveredPositions()
    seen: list[set[int]] = [set()]
    for start in range(0, 40, size):
        batch = sorted(order[start : start + size])
        record.add(_spans(batch))
        seen.append(seen[-1] | set(batch))
        assert _set(record) == seen[-1] and record.samples == len(seen[-1])
        assert record.batches == len(seen) - 1
        left = {position for lo, hi in record.left_of(5, 33) for position in range(lo, hi)}
        assert left == set(range(5, 33)) - seen[-1]
        for back in range(len(seen)):
            before = record.rewound(back)
            assert _set(before) == seen[-1 - back] and before.batches == record.batches - back
        assert DeliveredPositions.of_bits(record.batches, record.low, record.bits()).above == record.above
    assert (record.low, record.above, record.bits()) == (40, [], b"")


def test_in_order_takes_no_bits_and_no_memory() -> None:
    record = DeliveredPositions()
    for number in range(3 * HISTORY):
        record.add([(4 * number, 4 * number + 4)])
    assert (record.low, record.above) == (12 * HISTORY, [])
    assert record.floor == 8 * HISTORY
    assert record.rewound(HISTORY).low == 8 * HISTORY


def test_a_record_with_more_spans_than_a_run_leaves() -> None:
    DeliveredPositions.of_bits(1, 0, b"\xaa" * (1 << 15))
    with pytest.raises(ValueError, match="'above' has 131076 spans"):
        DeliveredPositions.of_bits(1, 0, b"\xaa" * ((1 << 15) + 1))


def test_the_survivor_is_that_of_the_last_batch_that_has_one() -> None:
    record = DeliveredPositions()
    tickets = [None, Ticket(0, Position(4), "a"), None, Ticket(0, Position(13), "b", 2)]
    for number, ticket in enumerate(tickets):
        record.add([(4 * number, 4 * number + 4)], ticket)
    known = [record.rewound(back).survivor for back in range(5)]
    assert known == [tickets[3], tickets[1], tickets[1], None, None]


def test_further_back_than_was_delivered() -> None:
    record = DeliveredPositions()
    record.add([(0, 4)])
    with pytest.raises(ValueError, match=r"ahead=2: this iterator has delivered 1 batches, and the last 1 can"):
        record.rewound(2)


@given(st.binary(max_size=40), st.integers(0, 1000))
def test_any_bits_are_a_record(bits: bytes, low: int) -> None:
    """Whatever a file says, the record it makes keeps its own rules."""
    record = DeliveredPositions.of_bits(3, low, bits)
    assert record.samples == low + sum(byte.bit_count() for byte in bits)
    edges = [edge for span in record.above for edge in span]
    assert edges == sorted(set(edges)) and (not edges or edges[0] > record.low)


def test_going_back_counts_what_the_consumer_got() -> None:
    """A batch that was left out, or raised, goes with the one before it."""
    record = DeliveredPositions()
    for start in (0, 4, 8):
        record.add([(start, start + 4)], returned=start != 4)
    assert [(back.batches, back.low) for back in map(record.rewound, range(3))] == [(3, 12), (2, 8), (0, 0)]
    with pytest.raises(ValueError, match="the last 2 can be taken back"):
        record.rewound(3)
