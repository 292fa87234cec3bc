"""What a tier asks of a policy: which items stay within a budget of bytes.

A tier tells its policy of every epoch that begins, and of every access. What is kept is a hit: ``used``. What is not is
read, and then offered: ``offer`` answers whether to keep it, and what goes in exchange. What the tier loses in other
ways (a corrupt copy, a file that changed, an older copy of what is offered) it tells by ``dropped``. A policy holds no
bytes, and reads no clock; one thread at a time calls it. ``cost_s`` should come from a model (latency and bytes /
rate): the noise of single reads would be taken for worth.

Keys are whole numbers from 0 on, one for each source of a data set, whoever reads it: the future of a million keys is
then an array of 8 MB, and looking a key up in it costs 50 ns. Of hashable keys it would be a dictionary of 100 MB.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from minato_gpu.caching.orders import Orders


class Admission(NamedTuple):
    """``keep`` the item that was offered, and let go of ``evict`` before that."""

    keep: bool
    evict: tuple[int, ...] = ()


KEEP, PASS = Admission(True), Admission(False)


class CachePolicy:
    """The books of what is kept, at most ``budget`` bytes at any time, and what all policies have in common: what fits
    is kept. Which items go for others is each policy's own: ``_exchange``.

    ``now``: the access' position in the order of all accesses of this tier; accesses may come a little out of order.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used_bytes = 0
        self._bytes: dict[int, int] = {}  # of each item that is kept

    def begin(self, epoch: int, orders: Orders | None, look_ahead: int) -> int:
        """The epoch begins; its order, and those of ``look_ahead`` more, are known from ``orders``.

        Returns the position of its first access. Accesses of the epoch before may still come after this.
        """
        return 0  # unless positions make a difference

    def offer(self, key: int, nbytes: int, cost_s: float, now: int) -> Admission:
        """The item, which is not kept, was missed at ``now``, has ``nbytes`` and took ``cost_s`` seconds: is it kept?

        Raises ValueError for a size or cost below 0.
        """
        if not (nbytes >= 0 and cost_s >= 0):  # nor NaN
            raise ValueError(f"an item's bytes and cost must be >= 0, got {nbytes} and {cost_s}")
        if nbytes > self.budget:
            return PASS
        earns = cost_s / nbytes if nbytes else inf
        short = nbytes - (self.budget - self.used_bytes)
        going = self._exchange(key, short, earns, now) if short > 0 else ()
        if going is None:
            return PASS
        for each in going:
            self.dropped(each)
        self._bytes[key] = nbytes
        self.used_bytes += nbytes
        self._entered(key, earns, now)
        return Admission(True, going) if going else KEEP

    def used(self, key: int, now: int) -> None:
        """An item that is kept was hit at ``now``."""

    def dropped(self, key: int) -> None:
        """The item is not there any more; nothing happens where it is not kept."""
        self.used_bytes -= self._bytes.pop(key, 0)

    def __contains__(self, key: int) -> bool:
        """Whether it is kept."""
        return key in self._bytes

    def __len__(self) -> int:
        """How many items are kept."""
        return len(self._bytes)

    def _exchange(self, key: int, short: int, earns: float, now: int) -> tuple[int, ...] | None:
        """What goes for an item that needs so many bytes more than there are, and ``earns`` so many seconds a byte;
        None where it is not worth that."""
        return None

    def _entered(self, key: int, earns: float, now: int) -> None:
        """An item is kept from now on."""
