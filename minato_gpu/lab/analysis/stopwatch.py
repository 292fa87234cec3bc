"""A user's data set, collate function and pipeline, with a clock before each, which workers run in their places.

Data, draws and errors are the user's own; what is added is two readings of two clocks and one line of JSON for each
sample, in a file of the thread's own. Whatever else somebody asks of the data set, a ``worker_init_fn`` say, or sets,
goes to the user's own.

Files, and no shared memory: a worker that is killed leaves what it has written, nobody needs to know how many samples
there will be, and a worker that was spawned finds them by name.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import NamedTuple

from torch.utils.data import IterableDataset

from minato_gpu.lab.analysis.files import Look, MeasuredReads
from minato_gpu.lanes.cpu_time import RunQueueDelay
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.pipeline.stages import Fields, Params, Stage
from minato_gpu.samples import JSON, Key, Value
from minato_gpu.sources.source import source_of


@dataclass
class Seen:
    """One sample: when it was finished (``at``), its key (None in a stream), its seconds without waits for a core,
    those computed (``cpu_s``), what was read for it, and its seconds by stage of the pipeline."""

    at: float
    key: JSON
    seconds: float
    cpu_s: float
    opened: MeasuredReads = field(default_factory=MeasuredReads)
    stages: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float, cpu_s: float, opened: MeasuredReads) -> None:
        """Adds the times and reads of a stage of the pipeline that ran on it."""
        self.seconds += seconds
        self.cpu_s += cpu_s
        self.stages[name] = self.stages.get(name, 0.0) + seconds
        before = self.opened
        nbytes, requests = before.nbytes + opened.nbytes, before.requests + opened.requests
        self.opened = MeasuredReads((*before.files, *opened.files), nbytes, requests)


class Collated(NamedTuple):
    """The collation of one batch: its seconds, and those on a core."""

    seconds: float
    cpu_s: float


class _Own:
    """A thread's clocks, and its files by folder and phase."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.files: dict[tuple[str, str], int] = {}
        self.delay = RunQueueDelay()
        self.look: Look | None = None


class _Local(threading.local):
    own: _Own | None = None


_LOCAL = _Local()


def _own() -> _Own:
    """Returns this thread's clocks and files, made on the first call; a forked process makes its own."""
    if _LOCAL.own is None or _LOCAL.own.process != os.getpid():
        _LOCAL.own = _Own()
    return _LOCAL.own


@dataclass(frozen=True)
class NoteBook:
    """Writes and reads the lines of one phase, in files in ``folder``. Workers get it pickled."""

    folder: str
    phase: str

    def write(self, kind: str, *values: JSON) -> None:
        """Writes one line, at once."""
        files, at = _own().files, (self.folder, self.phase)
        if at not in files:
            name = f"{self.phase}-{os.getpid()}-{threading.get_native_id()}.jsonl"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            files[at] = os.open(Path(self.folder) / name, flags, 0o600)
        os.write(files[at], json.dumps([kind, *values]).encode() + b"\n")

    def read(self) -> tuple[list[Seen], list[Collated]]:
        """Returns the notes of all threads so far."""
        samples: list[Seen] = []
        batches: list[Collated] = []
        for path in Path(self.folder).glob(f"{self.phase}-*.jsonl"):
            _of_thread(path.read_bytes(), samples, batches)
        return samples, batches


def plain_key(key: Key) -> JSON:
    """Returns a key as JSON can hold it: whole numbers and texts as they are, of all else its ``repr``."""
    if isinstance(key, (int, str)):
        return key
    try:
        return key.__index__()
    except (AttributeError, TypeError):
        return repr(key)


def _of_thread(notes: bytes, samples: list[Seen], batches: list[Collated]) -> None:
    """Parses a thread's whole lines: a stage belongs to the last sample before it. The last line is incomplete if its
    worker was killed."""
    last: Seen | None = None
    for kind, at, *values in map(json.loads, notes[: notes.rfind(b"\n") + 1].splitlines()):
        if kind == "items":
            keys, seconds, cpu_s, (files, nbytes, requests) = values
            each = len(keys) or 1
            opened = MeasuredReads(tuple(files), nbytes / each, requests / each)
            samples += [Seen(at, key, seconds / each, cpu_s / each, opened) for key in keys]
            last = samples[-1] if keys else None
        elif kind == "stage" and last is not None:
            name, seconds, cpu_s, opened = values
            last.add(name, seconds, cpu_s, MeasuredReads(tuple(opened[0]), *opened[1:]))
            last.at = at
        elif kind == "collate":
            batches.append(Collated(*values))


class Stopwatch:
    """Times calls, and with ``looks`` notes the files that they open. Picklable."""

    def __init__(self, book: NoteBook, *, looks: bool) -> None:
        self.book, self.looks = book, looks

    def timed(self, call: Callable[[], Value]) -> tuple[Value, float, float, float, MeasuredReads]:
        """Returns the call's result, when it ended, its seconds, those on a core, and what it read.

        Its seconds are without those in which it waited for a core: how many cores there are is another question.
        """
        own = _own()
        if self.looks and own.look is None:
            own.look = Look()
        delay, look = own.delay, own.look if self.looks else None
        waited = delay()  # outside of what is looked at: it reads, too
        if look is not None:
            look.begin()
        begin, on_core = perf_counter(), thread_time()
        try:
            value = call()
            end, cpu_s = perf_counter(), thread_time() - on_core
        finally:
            opened = MeasuredReads() if look is None else look.end()
        return value, end, max(end - begin - (delay() - waited), cpu_s), cpu_s, opened

    def items(self, keys: Sequence[Key], call: Callable[[], Value]) -> Value:
        """Times ``call``, which returns the samples of these keys, and returns its result."""
        value, end, seconds, cpu_s, opened = self.timed(call)
        self.book.write("items", end, [plain_key(key) for key in keys], seconds, cpu_s, opened)
        return value

    def collating(self, within: Callable[[Value], Value]) -> Callable[[Value], Value]:
        """Returns the collate function ``within``, timed."""
        return partial(self._collated, within)

    def _collated(self, within: Callable[[Value], Value], samples: Value) -> Value:
        value, end, seconds, cpu_s, _ = self.timed(lambda: within(samples))
        self.book.write("collate", end, seconds, cpu_s)
        return value

    def staged(self, stage: Stage) -> Stage:
        """Returns the stage with its CPU implementation timed."""
        return replace(stage, cpu=partial(self._staged, stage.name, stage.cpu))

    def _staged(self, name: str, within: Callable[[Fields, Params], Fields], fields: Fields, params: Params) -> Fields:
        written: Fields
        written, end, seconds, cpu_s, opened = self.timed(lambda: within(fields, params))
        self.book.write("stage", end, name, seconds, cpu_s, opened)
        return written


class _Delegates:
    """Base of timed data sets: attributes that are read or set are those of the data set within."""

    _within: Value
    _watch: Stopwatch

    def __init__(self, within: Value, watch: Stopwatch) -> None:
        self.__dict__.update(_within=within, _watch=watch)

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__") or "_within" not in self.__dict__:  # pickle asks before there is anything
            raise AttributeError(name)
        if name == "source" and (found := source_of(self._within)) is not None:
            return found
        return getattr(self._within, name)

    def __setattr__(self, name: str, value: Value) -> None:
        setattr(self._within, name, value)

    def __len__(self) -> int:
        return len(self._within)


class Watched(_Delegates):
    """A map-style data set whose samples are timed."""

    def __getitem__(self, key: Key) -> Value:
        return self._watch.items([key], lambda: self._within[key])


class WatchedItems(Watched):
    """A map-style data set with ``__getitems__`` whose samples are timed."""

    def __getitems__(self, keys: Sequence[Key]) -> Value:
        return self._watch.items(keys, lambda: self._within.__getitems__(keys))


class WatchedStream(_Delegates, IterableDataset[Value]):
    """An iterable data set whose samples are timed; they have no keys."""

    def __iter__(self) -> Iterator[Value]:
        samples = iter(self._within)
        while True:
            try:
                yield self._watch.items([None], lambda: next(samples))
            except StopIteration:
                return


def watched(dataset: Value, watch: Stopwatch) -> Value:
    """Returns the data set with its samples timed, of the same kind."""
    if isinstance(dataset, IterableDataset):
        return WatchedStream(dataset, watch)
    kind = WatchedItems if callable(getattr(dataset, "__getitems__", None)) else Watched
    return kind(dataset, watch)


def watched_pipeline(pipeline: Pipeline, watch: Stopwatch) -> Pipeline:
    """Returns the pipeline with each of its stages on the CPU timed."""
    return replace(pipeline, stages=tuple(map(watch.staged, pipeline.stages)))
