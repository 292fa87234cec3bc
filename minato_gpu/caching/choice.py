"""Which policy a tier follows, and how many epochs it looks ahead.

Of ``shards`` hosts that each read a random share of every epoch, a host reads a key again after k epochs with the
probability h_k = (1/n)(1 - 1/n)^(k-1). To be hit then, it must be kept for k epochs. In a cache that holds the share c
of the set, c n shares of an epoch have room, so hits of k epochs are worth their room from the shortest on until the
sum of k h_k reaches c n. Which hits those are can be told by looking as many epochs ahead as the longest of them takes,
and looking farther changes nothing (simulated: ``python -m benchmarks.caches``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST = 4  # times the number of shards: 1 in 55 keys comes later than that
_ALIKE = 1.5  # between what a byte of a dear item earns and what one of a cheap item does


@dataclass(frozen=True)
class Choice:
    """``policy``: "minio" or "next-use"; ``look_ahead``: epochs after the current one; ``why``: a sentence."""

    policy: str
    look_ahead: int
    why: str


def choose(*, shards: int, share: float, known: bool, alike: bool) -> Choice:
    """The policy of a tier that holds a ``share`` of the bytes of the set.

    ``shards``: among how many directories an epoch is shared out (ranks on one directory are one reader); ``known``:
    the orders of epochs to come can be drawn; ``alike``: a byte of any item saves about as many seconds, see ``alike``.
    """
    if share >= 1:
        return Choice("minio", 0, "minio: there is room for the whole set")
    if not alike and (shards == 1 or not known):
        why = "items are unlike, and what saves most seconds for its bytes stays"
        return Choice("next-use", 0, f"next-use: {why}")
    if not known:
        return Choice("minio", 0, "minio: the order of epochs to come is not known, and what is kept first is as good")
    if shards == 1:
        return Choice("minio", 0, "minio: one reader of the whole set has no more hits than items that are kept")
    ahead = look_ahead(shards, share)
    return Choice("next-use", ahead, f"next-use: of {shards} shards, the next {ahead} epochs tell what is read here soon")


def look_ahead(shards: int, share: float) -> int:
    """How many epochs after the current one suffice for next-use; see the module's head.

    At most 4 times ``shards``, so that the tables hold no more than 4 positions for each key of the set (32 bytes).
    Each epoch one more order is drawn, however far the look-ahead: for a million keys some 20 ms.
    """
    room, epochs = share * shards, 0
    while room > 1e-9 and epochs < _MOST * shards:
        epochs += 1
        room -= epochs * _returns(shards, epochs)
    return epochs


def bound(shards: int, share: float) -> float:
    """The hit rate that no policy exceeds: the hits that are worth their room, see the module's head."""
    room, hits, epochs = share * shards, 0.0, 0
    while room > 0 and epochs < 1000 * shards:
        epochs += 1
        fits = min(_returns(shards, epochs), room / epochs)
        hits += fits
        room -= epochs * fits
    return hits


def _returns(shards: int, epochs: int) -> float:
    """The probability that a key comes back to its host after so many epochs, and not before."""
    return (1 / shards) * (1 - 1 / shards) ** (epochs - 1)


def alike(nbytes: Sequence[int], costs_s: Sequence[float]) -> bool:
    """Whether a byte of one item saves about as many seconds as a byte of any other: of items from the 10th to the 90th
    hundredth, the dearest by no more than half as many again."""
    earns = np.asarray(costs_s, float) / np.maximum(np.asarray(nbytes, float), 1.0)
    if len(earns) == 0:
        return True
    low, high = np.quantile(earns, [0.1, 0.9]).tolist()
    return bool(high <= _ALIKE * low)
