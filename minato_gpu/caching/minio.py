"""The policy that never evicts: who comes first stays, and when the room is taken the rest passes by.

CoorDL's MinIO cache (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021). With one reader
that shuffles the whole set anew each epoch it is optimal for items of equal size and cost: a hit needs that the item
was there when the epoch began, so no policy has more hits in an epoch than it has items.
"""

from __future__ import annotations

from minato_gpu.caching.policy import CachePolicy


class Minio(CachePolicy):
    """Keeps what came first and never evicts; ``budget`` in bytes."""
