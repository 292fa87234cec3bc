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

    def __init__(self, length: int | None, *, unique: bool, used: bool = True) -> None:
        self.used = used  # samples' draws use the counts; else they are for states only, as far as these can hold them
        self.unique = unique  # no key comes twice
        self._seen = None if unique or length is None or length > _MOST else bytearray(length)
        self._others: Counter[Key] = Counter()

    def count(self, keys: list[Key]) -> list[int] | None:
        """Counts the keys. Returns how often each had come before, in order; None when all are 0."""
        if self.unique:
            return None
        out = [self._one(key) for key in keys]
        return out if any(out) else None

    def before(self, keys: list[Key]) -> Occurrences:
        """Returns a copy as it was before these keys, which are the last, were counted."""
        copy = Occurrences(None, unique=self.unique, used=self.used)
        copy._seen = None if self._seen is None else bytearray(self._seen)
        copy._others = Counter(self._others)
        if not self.unique and not copy._uncounted_at_once(keys):
            for key in keys:
                copy._uncount(key)
            copy._others = +copy._others
        return copy

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
        for key, count in others.items():
            if self._is_small(key):
                assert self._seen is not None
                fits = min(count, 255 - self._seen[key])
                self._seen[key] += fits
                count -= fits
            if count:
                self._others[key] = count

    def _uncounted_at_once(self, keys: list[Key]) -> bool:
        """Takes back a window of keys in one step, if all are small integers. Returns whether they are."""
        if self._seen is None or self._others or not keys or not {int}.issuperset(map(type, keys)):
            return False
        indices = np.array(keys)
        if indices.dtype.kind != "i" or indices.min() < 0 or indices.max() >= len(self._seen):
            return False
        np.subtract.at(np.frombuffer(self._seen, dtype=np.uint8), indices, 1)
        return True

    def _uncount(self, key: Key) -> None:
        key = name_of(key)
        if self._others[key]:
            self._others[key] -= 1
        elif self._is_small(key):
            assert self._seen is not None
            self._seen[key] -= 1

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
    """Returns the counter of keys for an epoch of this loader."""
    # without workers and pipeline nothing is drawn from a sample's own stream, but a loader that takes up the state
    # may have some: it counts once more what is drawn again, and goes on from the counts in any other state
    seeds, sampling = loader.num_workers > 0 or loader.pipeline is not None, Sampling(loader)
    counts = seeds or not (sampling.iterable or sampling.replays)
    return Occurrences(length_of(loader.dataset), unique=not counts or sampling.yields_once, used=seeds)


def _trimmed(bits: NDArray[np.uint8]) -> Plane:
    """Returns a plane without the full bytes at its beginning and the empty ones at its end.

    A sequence, or a shuffle of a window, then takes a few bytes, whatever the data set's length.
    """
    end = len(bits) - int(np.argmax(bits[::-1] != 0))  # there is one, or the plane would not be
    ones = int(np.argmax(bits[:end] != 0xFF)) if (bits[:end] != 0xFF).any() else end
    return ones, bits[ones:end].tobytes()
