"""All faults, by the file that lists them."""

from __future__ import annotations

from tests.mutations import (
    analysing,
    content,
    disk,
    failures,
    lanes,
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

BY_FILE: dict[str, tuple[Fault, ...]] = {
    "content": content.FAULTS,
    "scheduling": scheduling.FAULTS,
    "resuming": resuming.FAULTS,
    "memory": memory.FAULTS,
    "failures": failures.FAULTS,
    "lanes": lanes.FAULTS,
    "shared_memory": shared_memory.FAULTS,
    "reading": reading.FAULTS,
    "disk": disk.FAULTS,
    "pipelines": pipelines.FAULTS,
    "observing": observing.FAULTS,
    "analysing": analysing.FAULTS,
    "unseen": unseen.FAULTS,
}
ALL: tuple[Fault, ...] = tuple(fault for faults in BY_FILE.values() for fault in faults)
