"""Divides a host's cores among the ranks of one job. Pure functions.

Ranks that train together wait for the slowest, so cores go to the rank with the fewest batches in reserve, and those
ahead rest. After Lobster (ICPP 2022), which balances preparation among the GPUs of a node; simulated in
``benchmarks/node.py``.

Rejected: one pool of workers for all ranks, which chooses sample by sample (2 % to 4 % better, simulated): it needs a
process that owns all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Need(NamedTuple):
    """One rank's reserve of batches, and the workers that it can use."""

    ready: float  # batches ready for its consumer
    most: int  # workers that it can have at work


def shares(needs: Sequence[Need], cores: int) -> list[int]:
    """Returns how many workers each rank should have at work.

    The rank with the fewest batches ready gets as many as it can use, then the next, while cores are left. Each has at
    least one, so at most ``len(needs) - 1`` workers more than cores are at work.
    """
    found = [1] * len(needs)
    for at in sorted(range(len(needs)), key=lambda at: needs[at].ready):
        found[at] = max(1, min(cores, needs[at].most))
        cores -= found[at]
    return found
