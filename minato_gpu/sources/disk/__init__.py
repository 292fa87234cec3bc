"""A tier on NVMe: copies of sources' bytes, in a directory that processes share. ``tier.DiskTier`` is the way in.

Only ``tier`` and what it imports need LMDB.
"""

LEAST_BUDGET = 4 << 20
"""Bytes."""
