"""What loader and reader process say to each other: when, what together, and messages of any size."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from minato_gpu.sources.messages import LARGEST, MessageSocket
from minato_gpu.sources.process import LATER_S, PLENTY, SOON_S, Notifier
from minato_gpu.sources.reader import Outbox
from minato_gpu.sources.service import Wanted

PLACE = (4096, 100, 7, "a", 0, None)


# --- when the reader process tells what has come ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("tickets", "known", "delays"),
    [
        ((0, 1), 0, [SOON_S, None]),  # at first
        ((900, 901, 902), 900, [LATER_S, None, None]),  # plenty is known
        # one that comes late, which batches in order may be held up by
        ((900, 901, 901 - PLENTY, 901 - PLENTY - 1, 902), 900, [LATER_S, None, None, SOON_S, None]),
    ],
)
def test_how_soon_it_is_told(tickets: tuple[int, ...], known: int, delays: list[float | None]) -> None:
    """Where so many tickets are ``known`` already."""
    notifier = Notifier()
    assert [notifier.add((each, (PLACE,)), known + at) for at, each in enumerate(tickets, 1)] == delays


# --- what the loader says together -----------------------------------------------------------------------------


def tickets(begin: int, count: int) -> list[Wanted]:
    return [(number, number, (("a", number, 10),)) for number in range(begin, begin + count)]


def test_what_is_near_the_window_or_missing_there_is_said_at_once() -> None:
    outbox = Outbox()
    outbox.want(0, [])
    assert not outbox.is_due(0, missing=5) and outbox.take() == ([], [])
    outbox.want(1000, tickets(1000, 4))
    assert not outbox.is_due(0, missing=0)
    assert outbox.is_due(500, missing=0)
    outbox = Outbox()
    outbox.release(0, [PLACE])
    assert not outbox.is_due(500, missing=0)
    assert outbox.is_due(500, missing=1)


# --- messages --------------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setblocking(False)
    with pair[0], pair[1]:
        yield pair


def descriptors() -> list[str]:
    """Those that are open, but for the one that it takes to look."""
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


def test_messages_of_any_size(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = MessageSocket(ends[0]), MessageSocket(ends[1])
    sent = [b"x", bytes(LARGEST - 99), os.urandom(LARGEST), ("between", 1), os.urandom(3 << 20)]
    before = descriptors()
    for each in sent:
        here.put(each)
    assert here.flush()
    assert there.receive() == sent
    assert descriptors() == before
    assert there.receive() == []
    here.put("last")
    assert here.flush()
    ends[0].close()
    assert there.receive() == ["last"]
    with pytest.raises(ConnectionError):
        there.receive()


@pytest.mark.parametrize("size", [LARGEST - 99, LARGEST])
def test_a_full_socket_takes_nothing_in_part(ends: tuple[socket.socket, socket.socket], size: int) -> None:
    here, there = MessageSocket(ends[0]), MessageSocket(ends[1])
    sent = 0
    before = descriptors()
    while here.flush():
        here.put(bytes(size))
        sent += 1
    assert not here.flush()
    assert descriptors() == before
    got = there.receive()
    assert len(got) == sent - 1
    assert here.flush()
    assert got + there.receive() == [bytes(size)] * sent
