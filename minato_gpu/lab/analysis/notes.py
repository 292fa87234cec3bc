"""What workers note of each sample while the analysis watches: a line of JSON in a file of the thread's own.

Files, and no shared memory: a worker that is killed leaves what it has written, nobody needs to know how many samples
there will be, and a worker that was spawned finds them by name.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from minato_gpu.samples import JSON, Key

FOLDER = "minato_gpu_analysis_"
"""How the names of the folders begin in which the analysis leaves its files."""


class Opened(NamedTuple):
    """What a call was seen to read: ``files``, ``nbytes`` in so many ``requests``; None: it could not be seen."""

    files: tuple[str, ...] = ()
    nbytes: float | None = None
    requests: float | None = None


@dataclass
class Seen:
    """One sample: seconds, and those of them on a core, also by stage of the pipeline. ``at``: when it was finished."""

    at: float
    key: JSON
    seconds: float
    cpu_s: float
    opened: Opened = field(default_factory=Opened)
    stages: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float, cpu_s: float, opened: Opened) -> None:
        """A stage of the pipeline has been run on it."""
        self.seconds += seconds
        self.cpu_s += cpu_s
        self.stages[name] = self.stages.get(name, 0.0) + seconds
        known = [each for each in (self.opened, opened) if each.nbytes is not None]
        self.opened = Opened(
            (*self.opened.files, *opened.files),
            sum(each.nbytes or 0.0 for each in known) if known else None,
            sum(each.requests or 0.0 for each in known) if known else None,
        )


class Collated(NamedTuple):
    """One batch was put together of so many samples."""

    at: float
    seconds: float
    cpu_s: float
    samples: int


class _Files(threading.local):
    """This thread's open files, by folder and phase."""

    def __init__(self) -> None:
        self.process = -1
        self.open: dict[tuple[str, str], int] = {}


_FILES = _Files()


@dataclass(frozen=True)
class NoteBook:
    """Where the lines of one phase go. Picklable: workers get it."""

    folder: str
    phase: str

    def leave(self, kind: str, *values: JSON) -> None:
        """Write one line, at once."""
        line = json.dumps([kind, *values]).encode() + b"\n"
        os.write(self._file(), line)

    def _file(self) -> int:
        if _FILES.process != os.getpid():  # forked: the descriptors are the parent's
            _FILES.process, _FILES.open = os.getpid(), {}
        at = self.folder, self.phase
        if at not in _FILES.open:
            name = f"{self.phase}-{os.getpid()}-{threading.get_native_id()}.jsonl"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            _FILES.open[at] = os.open(Path(self.folder) / name, flags, 0o600)
        return _FILES.open[at]

    def read(self) -> tuple[list[Seen], list[Collated]]:
        """What all threads have noted so far, in the order in which it was finished."""
        samples: list[Seen] = []
        batches: list[Collated] = []
        for path in Path(self.folder).glob(f"{self.phase}-*.jsonl"):
            _of_thread(_lines(path), samples, batches)
        return sorted(samples, key=lambda seen: seen.at), sorted(batches)


def plain_key(key: Key) -> JSON:
    """A key as a line of JSON can hold it: numbers and texts as they are, of all else what it looks like."""
    if isinstance(key, (int, str)):
        return key
    try:
        return key.__index__()
    except (AttributeError, TypeError):
        return repr(key)


def _lines(path: Path) -> Iterator[list[JSON]]:
    """All whole lines: the last may have been cut off with its worker."""
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)


def _of_thread(lines: Iterator[list[JSON]], samples: list[Seen], batches: list[Collated]) -> None:
    """A thread works on one sample after the other: stages belong to the last one that it began."""
    last: Seen | None = None
    for kind, at, *values in lines:
        if kind == "items":
            keys, seconds, cpu_s, (files, nbytes, requests) = values
            each = len(keys) or 1
            opened = Opened(tuple(files), _share(nbytes, each), _share(requests, each))
            samples += [Seen(at, key, seconds / each, cpu_s / each, opened) for key in keys]
            last = samples[-1] if keys else None
        elif kind == "stage" and last is not None:
            name, seconds, cpu_s, opened = values
            last.add(name, seconds, cpu_s, Opened(tuple(opened[0]), *opened[1:]))
            last.at = at
        elif kind == "collate":
            batches.append(Collated(at, *values))


def _share(value: float | None, of: int) -> float | None:
    return None if value is None else value / of
