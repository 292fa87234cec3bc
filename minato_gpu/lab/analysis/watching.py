"""A user's data set, collate function and pipeline, with a clock before each: workers run these in their places.

Data, draws and errors are the user's own; what is added is two readings of two clocks and one line of a file for each
sample. Whatever else somebody asks of the data set, a ``worker_init_fn`` say, or sets, goes to the user's own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter, thread_time

from torch.utils.data import IterableDataset

from minato_gpu.lab.analysis.looking import Look
from minato_gpu.lab.analysis.notes import NoteBook, Opened, plain_key
from minato_gpu.lanes.cpu_time import RunQueueDelay
from minato_gpu.pipeline import Pipeline
from minato_gpu.samples import Key, Value
from minato_gpu.sources.declared import source_of
from minato_gpu.stages import Fields, Params, Stage


class _OfThread(threading.local):
    look: Look | None = None
    delay: RunQueueDelay | None = None
    process = -1


_OF_THREAD = _OfThread()


def _delay() -> RunQueueDelay:
    """This thread's own; a forked process's is another one than its parent's."""
    if _OF_THREAD.delay is None or _OF_THREAD.process != os.getpid():
        _OF_THREAD.delay, _OF_THREAD.process, _OF_THREAD.look = RunQueueDelay(), os.getpid(), None
    return _OF_THREAD.delay


class Stopwatch:
    """Times calls, and notes what they open where it ``looks``. Picklable."""

    def __init__(self, book: NoteBook, *, looks: bool) -> None:
        self.book, self.looks = book, looks

    def timed(self, call: Callable[[], Value]) -> tuple[Value, float, float, float, Opened]:
        """What the call returns, when it ended, its seconds, those on a core, and what it opened.

        Its seconds are without those in which it waited for a core: how many cores there are is another question.
        """
        delay = _delay()
        look = self._look()
        waited = delay()  # outside of what is looked at: it reads, too
        if look is not None:
            look.begin()
        begin, on_core = perf_counter(), thread_time()
        try:
            value = call()
            end, cpu_s = perf_counter(), thread_time() - on_core
        finally:
            opened = Opened() if look is None else look.end()
        return value, end, max(end - begin - (delay() - waited), cpu_s), cpu_s, opened

    def items(self, keys: Sequence[Key], call: Callable[[], Value]) -> Value:
        """A call that returns the samples of these keys."""
        value, end, seconds, cpu_s, opened = self.timed(call)
        self.book.leave("items", end, [plain_key(key) for key in keys], seconds, cpu_s, opened)
        return value

    def collating(self, within: Callable[[Value], Value]) -> Callable[[Value], Value]:
        """A collate function that is timed."""
        return partial(self._collated, within)

    def _collated(self, within: Callable[[Value], Value], samples: Value) -> Value:
        value, end, seconds, cpu_s, _ = self.timed(lambda: within(samples))
        self.book.leave("collate", end, seconds, cpu_s, len(samples) if isinstance(samples, list) else 1)
        return value

    def staged(self, stage: Stage) -> Stage:
        """A stage whose CPU implementation is timed."""
        return replace(stage, cpu=partial(self._staged, stage.name, stage.cpu))

    def _staged(self, name: str, within: Callable[[Fields, Params], Fields], fields: Fields, params: Params) -> Fields:
        written: Fields
        written, end, seconds, cpu_s, opened = self.timed(lambda: within(fields, params))
        self.book.leave("stage", end, name, seconds, cpu_s, opened)
        return written

    def _look(self) -> Look | None:
        if self.looks and _OF_THREAD.look is None:
            _OF_THREAD.look = Look()
        return _OF_THREAD.look if self.looks else None


class _Delegates:
    """Attributes are those of the data set within."""

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
    """One that returns several samples at once, too."""

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
    """The data set with a clock before it, of the same kind."""
    if isinstance(dataset, IterableDataset):
        return WatchedStream(dataset, watch)
    kind = WatchedItems if callable(getattr(dataset, "__getitems__", None)) else Watched
    return kind(dataset, watch)


def watched_pipeline(pipeline: Pipeline, watch: Stopwatch) -> Pipeline:
    """The pipeline with a clock before each of its stages on the CPU."""
    return replace(pipeline, stages=tuple(map(watch.staged, pipeline.stages)))
