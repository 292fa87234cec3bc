"""Samples on their way from worker to worker."""

from __future__ import annotations

import os

import pytest

from minato_gpu.memory.arena import Arena
from minato_gpu.sources import fields
from minato_gpu.sources.reading import Place
from minato_gpu.sources.sent_samples import SentSample, ask, ask_checksum, copy, place_of, receive, send, send_why_not

PIECES = [memoryview(b"a sample"), memoryview(b" in pieces")]
WHOLE = b"".join(PIECES)


def sent(asked: Place) -> SentSample:
    theirs, ours = fields.pair()
    with theirs, ours:
        send(ours, asked, 2.0, PIECES)
        found = receive(theirs)
        assert found is not None and receive(theirs) is None
        return found


def test_it_is_copied_unless_its_block_has_become_anothers() -> None:
    arena = Arena("test", 1 << 20)
    block = arena.allocate(len(WHOLE))
    found = sent(ask(7))
    assert found[:2] == (7, 2.0) and found.nbytes == len(WHOLE) and not found.is_gone
    found.fill(arena.buffer[block : block + len(WHOLE)])
    os.close(found.file)
    data = copy(arena, place_of(7, block, found.nbytes, found.checksum))
    assert data is not None and data.tobytes() == WHOLE
    arena.buffer[block + 3] += 1
    assert copy(arena, place_of(7, block, found.nbytes, found.checksum)) is None


def test_only_the_checksum_is_sent() -> None:
    found, whole = sent(ask_checksum(7)), sent(ask(7))
    os.close(whole.file)
    assert found.file == -1 and found.checksum == whole.checksum


@pytest.mark.parametrize("why", ["", "because"])
def test_there_is_none(why: str) -> None:
    theirs, ours = fields.pair()
    with theirs, ours:
        send_why_not(ours, 7, why)
        found = receive(theirs)
    assert found is not None and found.is_gone and (found.number, found.why_not) == (7, why)
