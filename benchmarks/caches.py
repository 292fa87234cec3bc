"""What a cache of a part of the data set saves, by the policy that says what it keeps.

Simulated (``cache_replay.py``): the policies that run in production (``minato_gpu.caching``) go through 48 epochs, and
the middle half counts. ``shards`` hosts each read a random share of every epoch and keep it in a directory of their
own, which has room for ``cache_share`` of the bytes of the whole set; one host, or several ranks on one directory, are
one shard. Each repetition has other orders.

    hit_rate     share of the accesses that are hits, of items of equal size
    belady       the most hits that any policy can have that knows all orders, found in another way than by a cache
    bound        what that comes to on average, for a set without end
    look_ahead   epochs of which the policy knows the order, beyond the current one; of ``soon`` what counts as such

``soon`` is what a tier on disk does (``minato_gpu/caching/soon.py``), which compares no copies with each other.

``drawn with replacement``: one reader, whose sampler draws from equal items, as many as there are, evenly or by weights
(``sigma``, log-normal). ``wrong about epochs to come``: others draw from the same generator between epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import click
import numpy as np

from benchmarks import report
from benchmarks.cache_replay import MISLED, ON_DISK, POLICIES, Draws, Shuffles, middle, most_hits, replay
from minato_gpu.caching.choice import bound, look_ahead, reach

_SHARDS = (1, 2, 4, 8)
_SHARES = (0.1, 0.25, 0.5, 0.75)
_SIGMAS = (0.0, 1.0, 2.0)
_EPOCHS = 48


@report.benchmark("caches", 3, epochs=_EPOCHS)
@click.option("--keys", type=click.IntRange(min=8), default=16_000, show_default=True, help="Of the simulated set.")
@click.option("--part", type=click.Choice(["equal", "drawn"]), help="Only this.")
def main(quick: bool, repetitions: int, keys: int, part: str | None) -> Iterator[dict[str, Any]]:
    keys = 400 if quick else keys
    if part != "drawn":
        yield from equal_rows(keys, repetitions)
    if part != "equal":
        yield from drawn_rows(keys, repetitions)


def equal_rows(keys: int, repetitions: int) -> Iterator[dict[str, Any]]:
    """Hit rates of each policy, beside the best one."""
    for shards, share in product(_SHARDS, _SHARES):
        orders = [Shuffles(keys, shards, seed) for seed in range(repetitions)]
        for row in _rates("simulated, equal items", orders, share, (*POLICIES, ON_DISK)):
            yield row | {"bound": bound(shards, share)}


def drawn_rows(keys: int, repetitions: int) -> Iterator[dict[str, Any]]:
    """Hit rates where keys come twice in an epoch."""
    for sigma, share in product(_SIGMAS, _SHARES):
        orders = [Draws(keys, sigma, seed) for seed in range(repetitions)]
        yield from _rates(f"simulated, drawn with replacement, sigma {sigma:g}", orders, share, (*POLICIES, MISLED))


def _rates(
    case: str, repeated: Sequence[Shuffles | Draws], share: float, policies: Sequence[str]
) -> Iterator[dict[str, Any]]:
    shards, once = repeated[0].shards, not isinstance(repeated[0], Draws)
    report.progress(f"{case}, {shards} shards, {share:.0%} cached")
    half, best = middle(_EPOCHS), []
    rates: dict[str, list[float]] = {policy: [] for policy in policies}
    for orders in repeated:
        accesses = len(orders.order(0)) * len(half)
        counts = most_hits([orders.order(epoch) for epoch in range(_EPOCHS)], int(share * orders.keys))
        best.append(sum(counts[epoch] for epoch in half) / accesses)
        for policy in policies:
            hits = replay(policy, orders, share, _EPOCHS)
            rates[policy].append(sum(len(hits[epoch]) for epoch in half) / accesses)
    for policy, found in rates.items():
        ahead: float | None = look_ahead(shards, share, once=once) if policy in ("next-use", MISLED) else None
        if policy == ON_DISK:
            ahead = reach(shards, share)
        row: dict[str, Any] = {"case": case, "shards": shards, "cache_share": share, "policy": policy}
        row |= {"look_ahead": ahead, "belady": report.median(best), **report.summarise("hit_rate", found)}
        yield row | report.summarise("of_belady", np.divide(found, best).tolist())


if __name__ == "__main__":
    main()
