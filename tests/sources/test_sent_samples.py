"""Samples, and fields of samples, on their way from workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from socket import socket

import pytest

from minato_gpu.memory.arena import Arena
from minato_gpu.sources.reading import Place
from minato_gpu.sources.sent_samples import (
    SentSample,
    ask,
    ask_checksum,
    copy,
    pair,
    place_of,
    receive,
    send,
    send_asked,
)
from tests.support.leaks import open_links

PIECES = [memoryview(b"a sample"), memoryview(b" in pieces")]
WHOLE = b"".join(PIECES)
Ends = tuple[socket, socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = pair()
    yield made
    for end in made:
        end.close()


def sent(ends: Ends, asked: Place) -> SentSample:
    send_asked(ends[1], asked, 2.0, PIECES)
    found = receive(ends[0])
    assert found is not None and receive(ends[0]) is None
    return found


def test_it_is_copied_unless_its_block_has_become_anothers(ends: Ends) -> None:
    arena = Arena("test", 1 << 20)
    block = arena.allocate(len(WHOLE))
    found = sent(ends, ask(7))
    assert found[:2] == (7, 2.0) and found.nbytes == len(WHOLE) and not found.is_gone
    found.fill(arena.buffer[block : block + len(WHOLE)])
    os.close(found.file)
    data = copy(arena, place_of(7, block, found.nbytes, found.checksum))
    assert data is not None and data.tobytes() == WHOLE
    arena.buffer[block + 3] += 1
    assert copy(arena, place_of(7, block, found.nbytes, found.checksum)) is None


def test_only_the_checksum_is_sent(ends: Ends) -> None:
    found, whole = sent(ends, ask_checksum(7)), sent(ends, ask(7))
    os.close(whole.file)
    assert found.file == -1 and found.checksum == whole.checksum


@pytest.mark.parametrize(("why", "said"), [("", ""), ("because", "because"), ("é" * 600, "é" * 250)])
def test_there_is_none(ends: Ends, why: str, said: str) -> None:
    send(ends[1], SentSample(7, why_not=why))
    found = receive(ends[0])
    assert found is not None and found.is_gone and (found.number, found.why_not, found.file) == (7, said, -1)


@pytest.mark.parametrize("count", [1, 2000])
def test_they_arrive_whole(ends: Ends, count: int) -> None:
    parts = [bytes([number % 256]) * (number % 300) for number in range(count)]
    send(ends[1], SentSample(7, 0.5, 0.25), [memoryview(part) if len(part) % 2 else part for part in parts])
    found = receive(ends[0])
    assert found is not None and found[:3] == (7, 0.5, 0.25)
    data = bytearray(found.nbytes)
    found.fill(memoryview(data))
    os.close(found.file)
    assert data == b"".join(parts) and not any("minato-sample" in link for link in open_links())


def test_the_end_of_either_side() -> None:
    one, other = pair(), pair()
    one[0].close()
    with one[1], pytest.raises(OSError):
        send(one[1], SentSample(1), [b"abc"])
    other[1].close()
    with other[0], pytest.raises(ConnectionError):
        receive(other[0])
