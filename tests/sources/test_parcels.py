"""Messages of any size come whole and in order, and leave nothing open."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from minato_gpu.sources import parcels
from minato_gpu.sources.parcels import LARGEST


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
    here, there = ends
    sent = [b"x", bytes(LARGEST), os.urandom(LARGEST + 1), b"between", os.urandom(3 << 20)]
    before = descriptors()
    for each in sent:
        parcels.send(here, each)
    assert [parcels.receive(there) for _ in sent] == sent
    assert descriptors() == before
    with pytest.raises(BlockingIOError):
        parcels.receive(there)
    here.close()
    assert parcels.receive(there) == b""


def test_a_full_socket_takes_nothing_in_part(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    large, sent = bytes(LARGEST), 0
    with contextlib.suppress(BlockingIOError):
        while True:
            parcels.send(here, large)
            sent += 1
    before = descriptors()
    with pytest.raises(BlockingIOError):
        parcels.send(here, large)
    assert descriptors() == before
    assert [parcels.receive(there) for _ in range(sent)] == [large] * sent
    with pytest.raises(BlockingIOError):
        parcels.receive(there)
