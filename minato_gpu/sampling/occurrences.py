"""Counts how often each key has come in an epoch: a part of what a sample's draws derive from (promise P2)."""

from __future__ import annotations

import zlib
from collections import Counter

import numpy as np

from minato_gpu.arguments import Arguments
from minato_gpu.lanes.base import NoSample
from minato_gpu.samples import Key, name_of
from minato_gpu.sampling.samplers import Sampling, length_of

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

    def stored(self) -> tuple[list[bytes], dict[Key, int]]:
        """Returns how often each key has come.

        For integers below ``length``, entry j has a bit for each that came more than j times, compressed.
        """
        others = {key: count for key, count in self._others.items() if not isinstance(key, NoSample)}
        seen = np.frombuffer(self._seen or b"", np.uint8)
        most = int(seen.max(initial=0))
        return [zlib.compress(np.packbits(seen > j).tobytes(), 1) for j in range(most)], others

    def restore(self, small: list[bytes], others: dict[Key, int]) -> None:
        """Counts on from what ``stored`` returned. Does nothing if every key is known to come once.

        Raises ValueError if it is damaged, or belongs to another data set.
        """
        if self.unique:
            return
        seen = np.frombuffer(self._seen or b"", np.uint8)
        for compressed in small[:255]:
            try:
                bits = zlib.decompressobj().decompress(compressed, len(seen) // 8 + 2)
            except zlib.error as error:
                raise ValueError("state: 'counts' is damaged") from error
            if len(bits) != (len(seen) + 7) // 8:
                raise ValueError(f"the state counts indices of a data set of another length than {len(seen)}")
            seen += np.unpackbits(np.frombuffer(bits, np.uint8), count=len(seen))
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
    return Occurrences(length_of(loader.dataset), unique=not seeds or Sampling(loader).is_torch_permutation)
