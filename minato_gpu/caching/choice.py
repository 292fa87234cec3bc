"""Chooses a tier's policy, and how many epochs it looks ahead.

Each of n = ``shards`` hosts reads a random share of every epoch, and a key again after k epochs with the probability
h_k = (1/n)(1 - 1/n)^(k-1). To be hit then, it must be kept for k epochs. A cache that holds the share c of the set has
room for c n of a host's epochs, so hits are worth their room from the shortest wait on, until the sum of k h_k reaches
c n. A policy recognises these hits if it looks as far ahead as the longest of their waits; looking farther changes
nothing (simulated: ``python -m benchmarks.caches``).

Of keys that are drawn with replacement, 86 in 100 come again within two mean intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

_MOST = 4  # times the number of shards: 1 in 55 keys comes later than that
_EPOCHS = 100
_NO_ROOM = 1e-9  # of the room: what is left by rounding
_LITTLE = 0.01  # of the accesses: more hits than that are worth looking ahead
_INTERVALS = 2  # mean intervals that are looked ahead where keys are drawn with replacement


@dataclass(frozen=True)
class Choice:
    """The policy of a tier, and the reason."""

    policy: str  # "minio" or "next-use"
    look_ahead: int  # epochs after the current one
    why: str  # a sentence


def choose(*, shards: float, share: float, known: bool, once: bool) -> Choice:
    """Returns the policy of a tier that has room for a ``share`` of the set's bytes (1 or more: for all).

    ``shards``: an epoch reads one in so many items of the set, for example because ranks share it out. ``known``: the
    orders of epochs to come can be drawn. ``once``: no key comes twice in an epoch.
    """
    if share >= 1:
        return Choice("minio", 0, "minio: there is room for the whole set")
    if known and not once:
        why = "next-use: keys may come twice in an epoch, and it is known when"
        return Choice("next-use", look_ahead(shards, share, once=False), why)
    if known and bound(shards, share) > share + _LITTLE:
        ahead = look_ahead(shards, share)
        why = f"next-use: an epoch reads one item in {shards:g}, and it is known which, {ahead} epochs ahead"
        return Choice("next-use", ahead, why)
    if not known:
        return Choice("minio", 0, "minio: the order of epochs to come is not known, so what came first is as good")
    return Choice("minio", 0, "minio: one reader of the whole set cannot have more hits than items are kept")


def look_ahead(shards: float, share: float, *, once: bool = True) -> int:
    """Returns how many epochs after the current one suffice for next-use.

    ``once``: no key comes twice in an epoch. At most 4 times ``shards``, so that the tables hold at most 4 positions
    for each key of the set, 32 bytes; and at most 100, since so many orders are drawn at the beginning. Each
    later epoch draws one more order only, however far the look-ahead.
    """
    if not once:
        return min(ceil(_INTERVALS * shards), _EPOCHS)
    return ceil(reach(shards, share))


def reach(shards: float, share: float) -> float:
    """Returns within how many epochs after the current one a key must come again to be worth its room.

    2.4 are the next two and the first four tenths of the third: what just fills the room. Assumes that no key comes
    twice in an epoch.
    """
    return sum(part for part, _ in _worth(shards, share, _most(shards)))


def _most(shards: float) -> int:
    """Returns how many epochs are looked ahead at most."""
    return min(int(_MOST * shards), _EPOCHS)


def bound(shards: float, share: float) -> float:
    """Returns the hit rate that no policy exceeds on average: that of the hits that are worth their room."""
    return sum(hits for _, hits in _worth(shards, share, min(ceil(1000 * shards), 10_000)))


def _worth(shards: float, share: float, most: int) -> Iterator[tuple[float, float]]:
    """Yields for waits of one epoch, of two and so on, while there is room: the part of the keys that wait so long for
    which there is room, and the hits that it gives, as a share of all accesses."""
    room = whole = share * shards
    for epochs in range(1, most + 1):
        if room <= _NO_ROOM * whole:
            return
        returns = (1 / shards) * (1 - 1 / shards) ** (epochs - 1)  # after so many epochs, and not before
        part = min(room / (epochs * returns), 1.0) if returns else 1.0
        yield part, part * returns
        room -= part * epochs * returns
