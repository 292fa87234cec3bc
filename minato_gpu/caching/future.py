"""The orders of epochs to come, and tables of when each key is needed next, made from them.

Positions count a tier's accesses; the epochs that are known lie one after another from ``start`` to ``end``. Two tables
hold all: of each key its next use, and of each known position the next use of its key after that. A use is found by
following the second from the first, and no step is taken twice. Memory: 16 bytes a key, and 8 a known position.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
NEVER = int(np.iinfo(np.int64).max)
"""The position of a use that is not known."""


class Orders(Protocol):
    """The orders of a tier's epochs, in the tier's keys.

    Two that are equal give the same orders (they compare seed, rank, ranks and all else that the orders depend on):
    what was made of one serves the other.
    """

    def order(self, epoch: int) -> Integers | None:
        """Returns the keys of the epoch's accesses, shape (accesses,); None if they cannot be known."""


def share(order: Integers, rank: int, ranks: int, *, drop_last: bool = False) -> Integers:
    """Returns what one of several ranks reads of an epoch's order, as torch's ``DistributedSampler`` shares it out.

    All ranks read equally many: the order goes on from its beginning, or with ``drop_last`` its end is dropped.
    """
    count = len(order) // ranks if drop_last else -(-len(order) // ranks)
    return np.resize(order, count * ranks)[rank::ranks]


class Future:
    """The next uses of keys 0 to ``keys`` - 1, from position ``start`` on.

    ``next_use``: a position for each key, or NEVER.
    """

    def __init__(self, keys: int, start: int = 0) -> None:
        self.keys = keys
        self.starts = [start]  # first positions of the known epochs, and where the last one ends
        self.next_use: Integers = np.full(keys, NEVER)
        self._last = np.full(keys, -1)  # last known use of each key
        self._following: Integers = np.empty(0, np.int64)  # next use of the key of each position from ``start`` on

    @property
    def start(self) -> int:
        return self.starts[0]

    @property
    def end(self) -> int:
        return self.starts[-1]

    @property
    def epochs(self) -> int:
        """The number of epochs that are known."""
        return len(self.starts) - 1

    def extend(self, order: Integers) -> None:
        """Adds an epoch: its keys in their order, shape (accesses,). A key may come more than once.

        Raises ValueError for unknown keys.
        """
        if len(order) and not 0 <= int(order.min()) <= int(order.max()) < self.keys:
            raise ValueError(f"keys must be from 0 to {self.keys - 1}, got {order.min()} to {order.max()}")
        at = np.argsort(order, kind="stable")
        keys, at = order[at], at + self.end  # the uses of each key side by side
        again = keys[1:] == keys[:-1]
        following = np.full(len(order), NEVER)
        following[at[:-1][again] - self.end] = at[1:][again]
        self._following = np.concatenate((self._following, following))
        ends = np.ones(min(len(order), 1), bool)
        first, last = np.concatenate((ends, ~again)), np.concatenate((~again, ends))
        known = self._last[keys[first]]
        linked = known >= self.start
        self._following[known[linked] - self.start] = at[first][linked]
        self._last[keys[last]] = at[last]
        unknown = self.next_use[keys[first]] == NEVER
        self.next_use[keys[first][unknown]] = at[first][unknown]
        self.starts.append(self.end + len(order))

    def forget_epoch(self) -> None:
        """Drops the first of the known epochs, which is over: its uses will not come any more."""
        over = self.starts[1]
        while len(late := np.flatnonzero(self.next_use < over)):
            self.next_use[late] = self._following[self.next_use[late] - self.start]
        self._following = self._following[over - self.start :]
        del self.starts[0]

    def after(self, key: int, now: int) -> int:
        """Returns the key's first use after position ``now``, or NEVER, and forgets its uses until then for good."""
        use: int = self.next_use.item(key)
        if use <= now:
            while use <= now:
                use = self._following.item(use - self.start)
            self.next_use[key] = use
        return use
