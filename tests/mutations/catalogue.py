"""All faults, by name."""

from __future__ import annotations

from tests.mutations import (
    analysing,
    content,
    disk,
    failures,
    memory,
    observing,
    pipelines,
    reading,
    resuming,
    scheduling,
    shared_memory,
    unseen,
)
from tests.mutations.fault import Fault

ALL: tuple[Fault, ...] = (
    *content.FAULTS,
    *scheduling.FAULTS,
    *resuming.FAULTS,
    *memory.FAULTS,
    *failures.FAULTS,
    *shared_memory.FAULTS,
    *reading.FAULTS,
    *disk.FAULTS,
    *pipelines.FAULTS,
    *observing.FAULTS,
    *analysing.FAULTS,
    *unseen.FAULTS,
)
