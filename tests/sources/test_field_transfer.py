"""Fields on their way from workers to the reader process: whole, or not at all, and nothing is left open."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from socket import socket

import pytest

from minato_gpu.sources.field_transfer import pair, receive, send
from tests.support.leaks import open_links

Ends = tuple[socket, socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = pair()
    yield made
    for end in made:
        end.close()


def open_files() -> int:
    return sum("minato-fields" in link for link in open_links())


@pytest.mark.parametrize("count", [1, 3, 2000])
def test_they_arrive_whole(ends: Ends, count: int) -> None:
    parts = [bytes([number % 256]) * (number % 300) for number in range(count)]
    assert open_files() == 0
    assert receive(ends[0]) is None
    assert send(ends[1], 7, [memoryview(part) if len(part) % 2 else part for part in parts], 0.25, 0.5)
    found = receive(ends[0])
    assert found is not None
    assert found[:3] == (7, 0.25, 0.5)
    data = bytearray(found.nbytes)
    found.fill(memoryview(data))
    os.close(found.file)
    assert data == b"".join(parts)
    assert open_files() == 0


def test_nobody_waits_for_room(ends: Ends) -> None:
    assert open_files() == 0
    sent = [send(ends[1], number, [b"abc"], 0.0, 0.0) for number in range(1000)]
    assert sent.index(False) < 100
    assert sent == sorted(sent, reverse=True)
    got = 0
    while (found := receive(ends[0])) is not None:
        assert found.sample == got
        os.close(found.file)
        got += 1
    assert got == sum(sent)
    assert send(ends[1], 1, [b"abc"], 0.0, 0.0), "there is room again"
    assert open_files() == 0


def test_where_descriptors_are_short_they_are_not_kept(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    assert send(ends[1], 1, [b"abc"], 0.0, 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert not send(ends[1], 1, [b"abc"], 0.0, 0.0)
        found = receive(ends[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found is not None and (found.file, found.nbytes) == (-1, 0)


def test_the_end_of_either_side(ends: Ends) -> None:
    ends[0].close()
    assert not send(ends[1], 1, [b"abc"], 0.0, 0.0)
    others = pair()
    others[1].close()
    with pytest.raises(ConnectionError), others[0]:
        receive(others[0])
