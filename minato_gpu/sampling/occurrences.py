"""Counts how often each key has come in an epoch: a part of what a sample's draws derive from (promise P2)."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from minato_gpu.arguments import Arguments
from minato_gpu.lanes.base import NoSample
from minato_gpu.samples import Key, name_of
from minato_gpu.sampling.samplers import Sampling, length_of

Plane = tuple[int, bytes]
"""A bit for each index, in bytes: so many that are all ones, those that follow, and then only zeros."""


_MOST = 1 << 32  # bytes; keys of larger data sets are counted one by one


class Occurrences:
    """Counts of how often each key has come in the epoch so far. Integers below ``length`` take one byte each."""

    def __init__(self, length: int | None, *, unique: bool) -> None:
        self.unique = unique  # no key comes twice, or nobody asks
        self._seen = None if unique or length is None or length > _MOST else bytearray(length)
        self._others: Counter[Key] = Counter()

    def count(self, keys: list[Key]) -> list[int] | None:
        """Counts the keys. Returns how often each had come before, in order; None when all are 0."""
        if self.unique:
            return None
        out = [self._one(key) for key in keys]
        return out if any(out) else None

    def uncount(self, keys: list[Key]) -> None:
        """Takes back what ``count`` did for these keys, the last ones. Raises ValueError if they have not come."""
        for key in [] if self.unique else map(name_of, keys):
            if isinstance(key, NoSample):
                continue
            if self._others[key] > 0:
                self._others[key] -= 1
            elif self._is_small(key) and self._seen is not None and self._seen[key]:
                self._seen[key] -= 1
            else:
                raise ValueError(f"state: key {key!r} is stored and has not been counted")
        self._others = +self._others

    def planes(self) -> tuple[list[Plane], dict[Key, int]]:
        """Returns how often each key has come. For integers, plane j has a bit for each that came more than j times."""
        others = {key: count for key, count in self._others.items() if not isinstance(key, NoSample)}
        if self._seen is None:
            return [], others
        seen = np.frombuffer(self._seen, dtype=np.uint8)
        most = int(seen.max(initial=0))
        return [_trimmed(np.packbits(seen > j)) for j in range(most)], others

    def restore(self, planes: list[Plane], others: dict[Key, int]) -> None:
        """Counts on from what ``planes`` returned. Does nothing if every key is known to come once.

        Raises ValueError if it belongs to another data set.
        """
        if self.unique:
            return
        if planes and self._seen is None:
            raise ValueError("the state counts indices of a data set with a length, and this one has none")
        for ones, plane in planes:
            assert self._seen is not None
            room = (len(self._seen) + 7) // 8 - ones
            if not 0 <= len(plane) <= room:
                raise ValueError(f"the state counts indices of a data set of another length than {len(self._seen)}")
            whole = np.full(ones + room, 0xFF, np.uint8)
            whole[ones:] = 0
            whole[ones : ones + len(plane)] = np.frombuffer(plane, dtype=np.uint8)
            seen = np.frombuffer(self._seen, dtype=np.uint8)
            seen += np.unpackbits(whole, count=len(seen))
        self._others.update(others)

    def _is_small(self, key: Key) -> bool:
        return self._seen is not None and type(key) is int and 0 <= key < len(self._seen)

    def _one(self, key: Key) -> int:
        seen = self._seen
        if seen is not None and type(key) is int and 0 <= key < len(seen) and seen[key] < 255:
            seen[key] += 1
            return seen[key] - 1
        name = name_of(key)
        if type(name) is int and name is not key:  # NumPy's or PyTorch's: it has the same draws
            return self._one(name)
        key = name
        before = self._others[key]
        self._others[key] += 1
        return before + (255 if self._is_small(key) else 0)


def occurrences_of(loader: Arguments) -> Occurrences:
    """Returns the counter of keys for an epoch of this loader.

    Without workers and pipeline nothing is drawn from a sample's own stream, so nothing is counted.
    """
    seeds = loader.num_workers > 0 or loader.pipeline is not None
    return Occurrences(length_of(loader.dataset), unique=not seeds or Sampling(loader).yields_once)


def _trimmed(bits: NDArray[np.uint8]) -> Plane:
    """Returns a plane without the full bytes at its beginning and the empty ones at its end.

    A sequence, or a shuffle of a window, then takes a few bytes, whatever the data set's length.
    """
    end = len(bits) - int(np.argmax(bits[::-1] != 0))  # there is one, or the plane would not be
    ones = int(np.argmax(bits[:end] != 0xFF)) if (bits[:end] != 0xFF).any() else end
    return ones, bits[ones:end].tobytes()
