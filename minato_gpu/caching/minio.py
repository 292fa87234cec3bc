"""Never evict: who comes first stays, and when all room is taken the rest passes by.

CoorDL's MinIO cache (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021). With one reader
that shuffles the whole set anew each epoch it is optimal for items of equal size and cost: a hit needs that the item
was there when the epoch began, so no policy has more hits in an epoch than it has items.
"""

from __future__ import annotations

from minato_gpu.caching.orders import Orders
from minato_gpu.caching.policy import KEEP, PASS, Verdict, check


class Minio:
    """See the module's head; ``budget`` in bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used_bytes = 0
        self._bytes: dict[int, int] = {}

    def begin(self, epoch: int, orders: Orders | None, look_ahead: int) -> int:
        return 0  # positions make no difference

    def offer(self, key: int, nbytes: int, cost_s: float, now: int, *, ahead: bool = False) -> Verdict:
        check(nbytes, cost_s)
        old = self._bytes.get(key)
        if old is not None:
            self.dropped(key)
        if nbytes > self.budget - self.used_bytes:
            return PASS if old is None else Verdict(False, (key,))
        self._bytes[key] = nbytes
        self.used_bytes += nbytes
        return KEEP

    def used(self, key: int, now: int) -> None:
        """It makes no difference."""

    def dropped(self, key: int) -> None:
        self.used_bytes -= self._bytes.pop(key, 0)

    def __contains__(self, key: int) -> bool:
        return key in self._bytes

    def __len__(self) -> int:
        return len(self._bytes)
