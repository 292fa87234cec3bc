"""``History``: what each key cost when it was last prepared, in two bytes per lane and index.

A cost is stored as its logarithm in steps of 0.05 %, from 0.1 microseconds to a day; 0 means not recorded. The array of
a data set of known length is allocated zeroed and committed page by page as indices are written, so that 100 million
indices take nothing until used. Other keys go to a dict by their hash (two keys of one hash share a cost). It holds the
last million, in some 100 MB: where keys are the lists of a shuffled batch sampler, none ever repeats.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from minato_gpu.samples import Key, name_of

Array = NDArray[np.float64]
Keys = Sequence[Key] | NDArray[np.integer]

_LOWEST = log(1e-7)
_STEP = (log(86400.0) - _LOWEST) / 65534
MOST = 1 << 20


def plain(keys: Keys) -> Keys:
    """Returns the keys as an array if all are Python or NumPy integers, else as they are."""
    if isinstance(keys, np.ndarray) or not all(map(_is_integer, set(map(type, keys)))):
        return keys
    found = np.array(keys)
    return found if found.dtype.kind in "iu" else keys


def _is_integer(kind: type) -> bool:
    return kind is int or issubclass(kind, np.integer)


class History:
    """Log costs by key for one lane. ``length``: number of integer indices; None when unknown."""

    def __init__(self, length: int | None = None) -> None:
        self._codes = np.zeros(length or 0, dtype=np.uint16)
        self._others: OrderedDict[int, int] = (
            OrderedDict()
        )  # by the hash of the key; of a dict the first one takes long
        self.recorded = 0  # keys with a cost

    def read(self, keys: Keys) -> Array:
        """Returns the log costs of the keys, shape (n,); nan where none is recorded."""
        indices = self._indices(keys)
        found = np.array([self._code(key) for key in keys]) if indices is None else self._codes[indices]
        codes = found.astype(np.float64)
        return np.where(codes > 0, _LOWEST + (codes - 1) * _STEP, np.nan)

    def _code(self, key: Key) -> int:
        place = self._place(key)
        return self._others.get(hash(name_of(key)), 0) if place is None else int(self._codes[place])

    def write(self, keys: Keys, logs: Array) -> None:
        """Records log costs; of a key given twice the last one counts."""
        codes = np.clip(np.rint((logs - _LOWEST) / _STEP) + 1, 1, 65535).astype(np.uint16)
        indices = self._indices(keys)
        if indices is not None:
            self.recorded += len(set(indices[self._codes[indices] == 0].tolist()))  # np.unique imports for 20 ms first
            self._codes[indices] = codes
            return
        for key, code in zip(keys, codes.tolist(), strict=True):
            self.recorded += not self._code(key)
            if (place := self._place(key)) is not None:
                self._codes[place] = code
                continue
            self._others[hash(name_of(key))] = code
            if len(self._others) > MOST:
                self._others.popitem(last=False)
                self.recorded -= 1

    def _indices(self, keys: Keys) -> NDArray[np.intp] | None:
        """Returns the keys as an index array if all are indices of the array, else None."""
        found = plain(keys)
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or not len(found):
            return None
        least, most = np.minimum.reduce(found), np.maximum.reduce(found)
        return found.astype(np.intp, copy=False) if least >= 0 and most < len(self._codes) else None

    def _place(self, key: Key) -> int | None:
        """Returns the key as an index of the array, or None."""
        if not isinstance(key, (int, np.integer)) or isinstance(key, bool):
            return None
        return int(key) if 0 <= key < len(self._codes) else None
