"""Who hears a loader's facts: whom its arguments name."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path

from minato_gpu.notices import LOGGER
from minato_gpu.observe.facts import Facts, Hearer
from minato_gpu.observe.ranges import Ranges
from minato_gpu.observe.trace import Trace
from minato_gpu.observe.trace_file import TraceFile

Push = Callable[[str], object]


def add_ranges(facts: Facts, push: Push, pop: Callable[[], object]) -> None:
    """Have a profiler show the training loop's waits."""
    facts.subscribe(Ranges(push, pop))


def add_trace(facts: Facts, path: Path, limit: int, owner: object) -> None:
    """Write what happens to ``path``, at most ``limit`` bytes, until ``owner`` is gone or Python ends.

    Raises OSError where it cannot be written.
    """
    file = TraceFile(path, limit)
    weakref.finalize(owner, file.close)
    hearer: list[Hearer] = []

    def full() -> None:
        facts.unsubscribe(hearer[0])
        LOGGER.warning("%s holds its %d bytes: what happens from now on is not in it", file.path, limit)

    rank = os.environ.get("RANK")
    name = "minato_gpu" if rank is None else f"minato_gpu, rank {rank}"
    hearer.append(Trace(file, name, os.getpid(), full))
    facts.subscribe(hearer[0])
