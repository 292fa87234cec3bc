"""What a tier asks of a policy: which items stay within a budget of bytes.

A tier tells its policy of every epoch that begins, and of every access. What is kept is a hit: ``used``. What is not is
read, and then offered: ``offer`` answers whether to keep it, and what goes in exchange. What the tier loses in other
ways (a corrupt copy, a file that changed) it tells by ``dropped``. A policy holds no bytes, and reads no clock; one
thread at a time calls it. ``cost_s`` should come from a model (latency and bytes / rate): the noise of single reads
would be taken for worth.

Keys are whole numbers from 0 on, one for each source of a data set, whoever reads it: the future of a million keys is
then an array of 8 MB, and looking a key up in it costs 50 ns. Of hashable keys it would be a dictionary of 100 MB.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from minato_gpu.caching.orders import Orders


class Verdict(NamedTuple):
    """``keep`` the item that was offered, and let go of ``evict`` before that: an older copy of the same key, too."""

    keep: bool
    evict: tuple[int, ...] = ()


KEEP, PASS = Verdict(True), Verdict(False)


class Policy(Protocol):
    """``now``: the access' position in the order of all accesses of this tier; accesses may come a little out of order.

    ``used_bytes`` is at most ``budget``, in bytes, at any time.
    """

    budget: int
    used_bytes: int

    def begin(self, epoch: int, orders: Orders | None, look_ahead: int) -> int:
        """The epoch begins; its order, and those of ``look_ahead`` more, are known from ``orders``.

        Returns the position of its first access. Accesses of the epoch before may still come after this.
        """

    def offer(self, key: int, nbytes: int, cost_s: float, now: int, *, ahead: bool = False) -> Verdict:
        """The item was missed at ``now``, has ``nbytes`` and took ``cost_s`` seconds: is it kept?

        ``ahead``: it was read before it is needed, the access is still to come: then nothing goes that may be needed
        sooner. Raises ValueError for a size or cost below 0.
        """

    def used(self, key: int, now: int) -> None:
        """An item that is kept was hit at ``now``."""

    def dropped(self, key: int) -> None:
        """The item is not there any more; nothing happens where it is not kept."""

    def __contains__(self, key: int) -> bool:
        """Whether it is kept."""

    def __len__(self) -> int:
        """How many items are kept."""


def check(nbytes: int, cost_s: float) -> None:
    """Raise ValueError for what no item can have, NaN too."""
    if not (nbytes >= 0 and cost_s >= 0):
        raise ValueError(f"an item's bytes and cost must be >= 0, got {nbytes} and {cost_s}")
