"""The cores of a host that the ranks of one job share (``max_workers="host"``), as torchrun's variables tell them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from minato_gpu.util.threads import usable_cores


@dataclass(frozen=True)
class HostCores:
    """A rank's knowledge of its host."""

    rank: int  # among the ranks on this host
    ranks: int
    cores: int  # that they share; at least ``num_workers`` for each
    most: int  # workers that one rank may have at work
    job: str  # names the page of memory on which the job's ranks meet (engine/host_share.py)

    @classmethod
    def of_this_rank(cls, workers: int) -> HostCores:
        """Reads torchrun's variables; without them there is one rank. ``workers``: the loader's ``num_workers``, for
        which each rank counts as having cores enough.

        Raises ValueError for more ranks than cores, a rank that is not one of them, or variables that are no numbers.
        """
        ranks, rank = _variable("LOCAL_WORLD_SIZE", 1), _variable("LOCAL_RANK", 0)
        cores = usable_cores()
        if not 0 <= rank < ranks:
            raise ValueError(f"LOCAL_RANK={rank} is not below LOCAL_WORLD_SIZE={ranks}")
        if ranks > cores:
            raise ValueError(
                f"max_workers='host' shares {cores} cores out to {ranks} ranks (LOCAL_WORLD_SIZE): each needs one at "
                "least; leave max_workers out"
            )
        cores = max(cores, ranks * workers)
        names = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
        allowed = sorted(os.sched_getaffinity(0))  # ranks that are bound to cores of their own share none
        job = hashlib.blake2b(repr((ranks, *names, allowed)).encode(), digest_size=8).hexdigest()
        return cls(rank, ranks, cores, min(cores, -(-2 * cores // ranks)), job)


def _variable(name: str, otherwise: int) -> int:
    value = os.environ.get(name, str(otherwise))
    if not value.isdecimal():
        raise ValueError(f"max_workers='host' reads {name}, which torchrun sets; it is {value!r}, not a number")
    return int(value)
