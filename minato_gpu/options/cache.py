"""Checks the arguments ``cache`` and ``cache_dir``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minato_gpu.arguments import Arguments
from minato_gpu.memory.limits import memory_limit
from minato_gpu.sources.disk import LEAST_BUDGET
from minato_gpu.sources.source import source_of
from minato_gpu.util.numbers import nbytes


@dataclass(frozen=True)
class CacheOptions:
    """Budgets in bytes (0: no such tier), and the absolute path of the tier on disk ("": none)."""

    memory_bytes: int = 0
    disk_bytes: int = 0
    directory: str = ""

    def __bool__(self) -> bool:
        return bool(self.memory_bytes or self.disk_bytes)

    @classmethod
    def check(cls, loader: Arguments) -> CacheOptions:
        """Resolves a loader's arguments; makes the directory if there is none.

        Raises ValueError (or TypeError) naming what is wrong, CacheDirectoryError for a directory that cannot be used.
        """
        options = cls._resolved(loader.cache, loader.cache_dir)
        if not options:
            return options
        if source_of(loader.dataset) is None:
            raise ValueError(
                "cache: the data set does not say where its samples' bytes lie, so there is nothing to keep; give it a "
                "method source(key) that returns a minato_gpu.Source, or leave cache out"
            )
        limit, what = memory_limit()
        if options.memory_bytes > limit:
            raise ValueError(f"cache={options.memory_bytes} is more than the {limit} bytes of {what}; pass less")
        if options.disk_bytes:
            from minato_gpu.sources.disk.tier import DiskTier

            DiskTier(options.directory, options.disk_bytes).close()
        return options

    @classmethod
    def _resolved(cls, cache: Any, directory: Any) -> CacheOptions:
        if directory is not None and not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"cache_dir must be a path or None, got {directory!r}")
        if directory is not None and not os.fspath(directory):
            raise ValueError("cache_dir is empty; name a directory, such as '/scratch/cache'")
        if cache is None:
            if directory is not None:
                raise ValueError("cache_dir is where copies are kept; say by cache how many bytes of them")
            return cls()
        budgets = cache if isinstance(cache, Mapping) else {"memory" if directory is None else "disk": cache}
        if not budgets or set(budgets) - {"memory", "disk"}:
            raise ValueError(f"cache must name 'memory', 'disk' or both, got {cache!r}")
        if ("disk" in budgets) != (directory is not None):
            raise ValueError(
                f"a budget of 'disk' and cache_dir go together, got cache={cache!r}, cache_dir={directory!r}"
            )
        memory, disk = (
            nbytes("cache", budgets[name], "leave it out to keep nothing") if name in budgets else 0
            for name in ("memory", "disk")
        )
        if 0 < disk < LEAST_BUDGET:
            raise ValueError(f"cache: a directory needs at least {LEAST_BUDGET} bytes, got {disk}")
        # absolute: the process that reads ahead may be started from another working directory
        return cls(memory, disk, "" if directory is None else str(Path(os.fsdecode(directory)).absolute()))
