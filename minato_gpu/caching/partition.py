"""The partition of one cache among hosts: each copy on one host, and none twice.

Method: rendezvous hashing (Thaler and Ravishankar 1998). Every host finds the same owner without asking, each owns an
equal share, and where a host leaves only what it owned has new owners. CoorDL (VLDB 2021) partitions caches likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b


class Partition:
    """The hosts of one cache, by any names that all of them use alike."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self._seeds = [blake2b(host.encode(), digest_size=16).digest() for host in hosts]

    def owner(self, name: bytes, left_out: Collection[str] = ()) -> str | None:
        """Returns the host that keeps what has this name, None where all hosts are left out."""
        best, owner = b"", None
        for host, seed in zip(self.hosts, self._seeds, strict=True):
            if host not in left_out:
                score = blake2b(name, digest_size=8, key=seed).digest()
                if score > best:
                    best, owner = score, host
        return owner
