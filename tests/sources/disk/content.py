"""Bytes to keep, and what of them is on disk."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable
from pathlib import Path

from minato_gpu.sources.disk.tier import DiskTier

BUDGET = 8 << 20
VERSION = b"1"
_FORK = multiprocessing.get_context("fork")


def content(number: int, size: int = 50_000) -> bytes:
    """The bytes that copy ``number`` has."""
    return random.Random(number).randbytes(size)


def key(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def file_of(path: Path, number: int) -> Path:
    """The file of copy ``number``, if it is there."""
    digits = key(number).hex()
    return path / digits[:2] / digits[2:]


def keep(tier: DiskTier, *numbers: int, version: bytes = VERSION, size: int = 50_000) -> int:
    """Write copies; returns how many were taken."""
    return sum(tier.write(key(number), version, memoryview(content(number, size))) for number in numbers)


def held(tier: DiskTier, number: int, version: bytes = VERSION) -> bytes | None:
    """What the tier serves of copy ``number``; None for a miss."""
    into = bytearray()

    def allocate(nbytes: int) -> memoryview:
        into.extend(bytes(nbytes))
        return memoryview(into)

    return None if tier.read(key(number), version, allocate) is None else bytes(into)


def kept(tier: DiskTier) -> set[int]:
    """The numbers of the copies that are there, of those below 4000."""
    numbers = {key(number): number for number in range(4000)}
    return {numbers[entry.key] for entry in tier.entries()}


def disk_bytes(path: Path) -> int:
    """What ``du`` says."""
    return sum(file.lstat().st_blocks * 512 for file in [path, *path.rglob("*")])


def _to_its_end(act: Callable[[], object]) -> None:
    """Do it in a process that ends without closing anything."""
    act()
    os._exit(0)


def elsewhere(act: Callable[[], object]) -> bool:
    """Do it in a process of its own at once; False where it has failed."""
    child = _FORK.Process(target=_to_its_end, args=(act,))
    child.start()
    child.join()
    return child.exitcode == 0
