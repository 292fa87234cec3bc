"""A cache on disk: copies of sources' bytes, one file each, in a directory that processes share."""

LEAST_BUDGET = 4 << 20
"""Least budget of a cache, in bytes."""
