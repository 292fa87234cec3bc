"""Arenas: blocks that join and are reused, pages given back, and memory that outlives the arena while it is used."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minato_gpu.memory import arena as module
from minato_gpu.memory.arena import Arena

MIB = 1 << 20


def held(arena: Arena) -> int:
    """Bytes of memory that the arena's file really takes."""
    return 512 * os.fstat(arena.fd).st_blocks


def fill(arena: Arena, offset: int, nbytes: int, value: int) -> None:
    np.frombuffer(arena.buffer, np.uint8, nbytes, offset)[:] = value


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * MIB)), max_size=60))
def test_blocks_never_overlap_and_are_reused(steps: list[tuple[bool, int]]) -> None:
    """Against a model: live blocks are disjoint, whole pages, at most an eighth too large (or a page)."""
    arena = Arena("test", 1 << 32)
    live: dict[int, int] = {}
    for allocate, number in steps:
        if allocate or not live:
            before = arena.allocated
            offset = arena.allocate(number)
            size = arena.allocated - before
            assert offset not in live and offset % 4096 == 0 and size % 4096 == 0
            assert number <= size < max(number * 9 / 8, number + 4096) + 4096 * (number == 0) + 1
            ends = sorted((at, at + length) for at, length in live.items())
            below = [(0, 0), *(block for block in ends if block[0] < offset), (offset, offset)]
            assert all(begin - end < size for (_, end), (begin, _) in itertools.pairwise(below)), "a lower gap fits"
            live[offset] = size
            ends = sorted((at, at + length) for at, length in live.items())
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
        else:
            offset = sorted(live)[number % len(live)]
            del live[offset]
            arena.free(offset)
        assert arena.allocated == sum(live.values())
    for offset in live:
        arena.free(offset)
    assert arena.allocate(arena.capacity // 2) == 0, "free blocks did not join"
    arena.close()


def test_memory_is_taken_when_written_and_given_back_when_much_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEEP_FREE", 4 * MIB)
    monkeypatch.setattr(module, "_LATELY", 4)
    arena = Arena("test")
    blocks = [arena.allocate(MIB) for _ in range(16)]
    assert held(arena) == 0
    for number, block in enumerate(blocks):
        fill(arena, block, MIB, number + 1)
    assert held(arena) == 16 * MIB
    for block in blocks[:-1]:
        arena.free(block)
    assert held(arena) <= 12 * MIB, "free pages are kept for ever"
    assert (np.frombuffer(arena.buffer, np.uint8, MIB, blocks[-1]) == 16).all(), "a live block lost its pages"
    again = [arena.allocate(MIB) for _ in range(15)]
    assert sorted(again) == sorted(blocks[:-1])
    for number, block in enumerate(again):
        fill(arena, block, MIB, number)
        assert arena.buffer[block + MIB - 1] == number
    arena.close()


def test_the_next_owner_of_an_arena() -> None:
    """What the last one laid down stays, until the new one frees it, and its place is used again."""
    first = Arena("first", 1 << 24)
    offsets = [first.allocate(100_000) for _ in range(6)]
    for offset in offsets:
        first.buffer[offset : offset + 100_000] = bytes([offset % 251]) * 100_000
    kept = [(offset, 100_000) for offset in (offsets[1], offsets[4])]
    before = os.fstat(first.fd).st_blocks
    first.forsake(kept)
    assert os.fstat(first.fd).st_blocks <= before / 2
    second = Arena("second", 1 << 24, fd=os.dup(first.fd))
    second.occupy(reversed(kept))
    new = [second.allocate(50_000) for _ in range(40)]
    for offset in new:
        assert all(offset + 50_000 <= lo or offset >= lo + 100_000 for lo, _ in kept)
    for offset, _ in kept:
        assert bytes(second.buffer[offset : offset + 100_000]) == bytes([offset % 251]) * 100_000
    for offset in (*new, *(offset for offset, _ in kept)):
        second.free(offset)
    assert second.allocated == 0
    assert second.allocate((1 << 24) - (1 << 20)) == 0, "the free extents were not joined"
    second.close()
    first.close()
