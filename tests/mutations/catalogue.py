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

_FILES = content, scheduling, resuming, memory, failures, lanes, shared_memory, reading, disk, pipelines
BY_FILE: dict[str, tuple[Fault, ...]] = {
    file.__name__.rpartition(".")[2]: file.FAULTS for file in (*_FILES, observing, analysing, unseen)
}
ALL: tuple[Fault, ...] = tuple(fault for faults in BY_FILE.values() for fault in faults)
