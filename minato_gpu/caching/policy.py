"""The interface between a tier and its policy, which decides which items stay within a budget of bytes.

A tier tells its policy of every epoch that begins, and of every access. What is kept is a hit: ``used``. What is not is
read, and then offered: ``offer`` answers what goes in exchange, or that it is not kept. What the tier loses in other
ways (a corrupt copy, a file that changed, an older copy of what is offered) it tells by ``dropped``. A policy holds no
bytes, and reads no clock; one thread at a time calls it.

Every byte is worth the same: reads ahead hide latency, and where the storage's rate bounds an epoch a byte that is kept
saves as many seconds, whatever item it is of.

Keys are whole numbers from 0 on, one for each source of a data set, whoever reads it: the future of a million keys is
then an array of 8 MB, and looking a key up in it costs 50 ns. Of hashable keys it would be a dictionary of 100 MB.
"""

from __future__ import annotations

from minato_gpu.caching.future import Orders


class CachePolicy:
    """Accounts for what is kept, at most ``budget`` bytes.

    What fits is kept; subclasses decide what is evicted (``_exchange``).

    ``now`` is an access' position in the order of all accesses of this tier; accesses may come a little out of order.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used_bytes = 0
        self._bytes: dict[int, int] = {}  # bytes of each item that is kept

    def begin(self, epoch: int, orders: Orders | None, look_ahead: int) -> int:
        """Begins an epoch; ``orders`` tell its order, and those of ``look_ahead`` more (None: no order is known).

        Returns the position of its first access; 0 from a policy to which positions make no difference. Accesses of the
        epoch before may still come after this.
        """
        return 0

    def offer(self, key: int, nbytes: int, now: int) -> tuple[int, ...] | None:
        """Decides whether to keep an item of ``nbytes`` bytes that was missed at ``now``.

        Returns the keys that go for it (none if there is room), which are no longer accounted for; or None if the item
        is not kept.
        """
        if nbytes > self.budget:
            return None
        short = nbytes - (self.budget - self.used_bytes)
        going = self._exchange(key, short, now) if short > 0 else ()
        if going is None:
            return None
        for each in going:
            self.dropped(each)
        self._bytes[key] = nbytes
        self.used_bytes += nbytes
        self._entered(key, now)
        return going

    def used(self, key: int, now: int) -> None:
        """Notes that an item that is kept was hit at ``now``."""

    def dropped(self, key: int) -> None:
        """Notes that an item is gone; does nothing if it is not kept."""
        self.used_bytes -= self._bytes.pop(key, 0)

    def __contains__(self, key: int) -> bool:
        """Returns whether the item is kept."""
        return key in self._bytes

    def __len__(self) -> int:
        """Returns the number of items that are kept."""
        return len(self._bytes)

    def _exchange(self, key: int, short: int, now: int) -> tuple[int, ...] | None:
        """Returns the keys to evict for an item that needs ``short`` bytes more than are free; None if the item is not
        worth that."""
        return None

    def _entered(self, key: int, now: int) -> None:
        """Notes that an item is kept from now on."""


class Minio(CachePolicy):
    """Keeps what came first and never evicts: CoorDL's MinIO cache (Mohan et al., "Analyzing and Mitigating Data Stalls
    in DNN Training", VLDB 2021).

    With one reader that shuffles the whole set anew each epoch it is optimal for items of equal size and cost: a hit
    needs that the item was there when the epoch began, so no policy has more hits in an epoch than it has items.
    """
