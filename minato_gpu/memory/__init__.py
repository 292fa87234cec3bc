"""Shared memory: arenas that one process allocates from and all map, and what is stored in them."""
