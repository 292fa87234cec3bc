"""The page of memory by which the ranks of one job on this host share its cores (``max_workers="host"``).

It is a small file in the user's private folder, mapped by every rank. A rank writes its own row and reads the others';
nobody waits for anybody. A row that has been silent for a second does not count, so a rank that is dead, stopped or
between two epochs leaves its cores to the others.

Ranks that train together wait for the slowest, so cores go to the rank with the fewest batches in reserve, and those
ahead rest. After Lobster (ICPP 2022), which balances preparation among the GPUs of a node; simulated in
``benchmarks/node.py``.

Rejected: one pool of workers for all ranks, which chooses sample by sample (2 % to 4 % better, simulated): it needs a
process that owns all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minato_gpu.memory.private_folder import SharedFile
from minato_gpu.options.host_cores import HostCores

PERIOD_S = 0.1  # between two looks at the page
_SILENT_S = 1.0
_WRITTEN, _READY, _MOST = range(3)  # columns: seconds of perf_counter, which all processes of a host share
_ROW_BYTES = 64  # float64 each; a cache line


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


class HostShare:
    """A rank's row in its job's page. ``workers``: how many should be at work now."""

    def __init__(self, host: HostCores, workers: int) -> None:
        """Maps the page of ``host.job``. ``workers``: how many are at work until the first ``look``.

        Raises OSError if the user's private folder cannot be used.
        """
        self.workers = workers
        self._host = host
        self._due = 0.0
        self._page = SharedFile(f"cores-{host.job}", _ROW_BYTES * host.ranks)

    def look(self, now: float, ready: float) -> bool:
        """Writes that ``ready`` batches are ready, and reads what the other ranks have, at most once in ``PERIOD_S``.

        ``now``: seconds of ``perf_counter``, which the ranks compare. Returns whether ``workers`` has changed.
        """
        if now < self._due:
            return False
        self._due = now + PERIOD_S
        rank, rows = self._host.rank, np.frombuffer(self._page.map).reshape(self._host.ranks, -1)
        rows[rank, :3] = now, ready, self._host.most
        alive = np.flatnonzero(rows[:, _WRITTEN] > now - _SILENT_S).tolist()
        needs = [Need(float(rows[at, _READY]), int(rows[at, _MOST])) for at in alive]
        before, self.workers = self.workers, shares(needs, self._host.cores)[alive.index(rank)]
        return self.workers != before

    def close(self) -> None:
        """Leaves the page; the last rank removes it."""
        self._page.close()
