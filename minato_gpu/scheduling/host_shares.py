"""Shares of a host's cores for the ranks of one job: decisions only.

Ranks that train together wait for the slowest of them, so cores belong to the rank that has least in reserve. Those
that are ahead rest. After Lobster (ICPP 2022), which balances the preparation of the GPUs of a node; simulated in
``benchmarks/node.py``.

Rejected: a pool of workers for all ranks, which chooses sample by sample (2 % to 4 % better, simulated): it needs a
process that owns all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Need(NamedTuple):
    """One rank: batches that lie ready for its consumer, and the most workers that it can have at work."""

    ready: float
    most: int


def shares(needs: Sequence[Need], cores: int) -> list[int]:
    """Return how many workers each rank should have at work.

    The rank with the fewest batches ready gets as many as it can use, then the next, while cores are left. Each has at
    least one, so at most ``len(needs) - 1`` workers more than cores are at work.
    """
    found = [1] * len(needs)
    for at in sorted(range(len(needs)), key=lambda at: needs[at].ready):
        found[at] = max(1, min(cores, needs[at].most))
        cores -= found[at]
    return found
