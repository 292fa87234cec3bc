"""Messages of any size between a loader and its reader process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from minato_gpu.sources.messages import LARGEST, MessageSocket


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
