"""A tier on NVMe: copies of sources' bytes, in a directory that processes share. ``tier.DiskTier`` is the way in."""
