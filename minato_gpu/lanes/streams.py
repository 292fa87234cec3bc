"""A worker's own stream of an iterable data set, from its beginning or from where an earlier run left it.

A data set, or its iterator, with ``state_dict`` and ``load_state_dict`` goes on from its own state. Any other stream is
read again from its beginning, and as many batches as were delivered are dropped; that can be broken off at any sample.
A stream that raised cannot be read again, nor one that draws from a global generator where other code draws from that,
too: a ``collate_fn`` of the user's or, without workers, the training loop.

Nobody can ask a worker for a state that is past, so it tells its own every ``snapshot_every_n_steps`` batches. What
came since is then read again (as in torchdata's loader between its snapshots).

When a state is loaded is torchdata's rule: a data set's before ``iter()``, that of what ``iter()`` returned after it. A
data set that returns *itself* is such an iterator: its ``iter()`` may begin anew, or make what its state goes into.

A data set may count its epochs. So its state is reported at the end of a stream too, and the next epoch begins from it
where the same data set would go on: in this process, or in a worker that stays. A state of an epoch's end may make the
next pass one that yields nothing: see ``_Passes``.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data.graph_settings import apply_random_seed

from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.snapshots import dumps
from minato_gpu.samples import Value, no_end

ITSELF = "itself"
"""The kind of a state of a data set that is its own iterator; the others are "iterator" and "dataset"."""


_RAISED = (
    "it has raised, and has no state of its own, so nobody knows where it would be if it were read again. Give the "
    "data set, or its iterator, state_dict() and load_state_dict(), which the loader then uses"
)


def is_stateful(thing: Value) -> bool:
    """Returns whether an object can save and load its state."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def share_seed(pipe: Value, seed: int) -> None:
    """Has a data pipe's order drawn from this seed, as PyTorch does before each of its epochs."""
    apply_random_seed(pipe, torch.Generator().manual_seed(seed))


class StreamState(NamedTuple):
    """The position of one worker's stream: ``batches`` of it were delivered, and no more come if it has ``ended``.

    It is taken up from ``state``: the stream's own, pickled, as it was ``since`` batches before (None: all is read
    again). A worker tells a position after each batch, the parent keeps those of what was delivered, and a stream is
    opened at one. ``error``: why it cannot be saved; of use to who saves only. ``over``: ``state`` is from the end of
    the epoch before, which had batches. ``size``: samples of the last batch, with one that raised; it is not saved.
    """

    state: bytes | None
    ended: bool = False
    error: str | None = None
    since: int = 0
    over: bool = False
    batches: int = 0
    size: int = 0

    @property
    def next_epoch(self) -> StreamState | None:
        """Where the epoch after this begins, if this stream is never opened; None without a state of the data set."""
        state = dataset_part(self.state)
        return None if state is None else StreamState(state, over=self.over)

    @property
    def within_itself(self) -> bool:
        """True if the state is one of a data set that is its own iterator, in the middle of its pass."""
        return self.batches > 0 and self.state is not None and pickle.loads(self.state)[0] == ITSELF

    @property
    def again(self) -> int:
        """The number of batches that are read again and dropped."""
        return self.batches if self.state is None else self.since

    @property
    def nbytes(self) -> int:
        """Bytes of the state, if it was reported with the last batch; else 0."""
        return 0 if self.state is None or self.since else len(self.state)


def dataset_part(state: bytes | None) -> bytes | None:
    """Returns the data set's part of a stream's state, pickled; None if it has none."""
    if state is None:
        return None
    kind, _, dataset = pickle.loads(state)
    if kind in ("dataset", ITSELF):
        return state
    return None if dataset is None else dumps(("dataset", dataset, None))


def told_of(dataset: Value, *, over: bool = False) -> StreamState:
    """Returns the state that a data set reports while it is not iterated; without ``state`` if it has none, or that
    raised (``error``)."""
    if not is_stateful(dataset):
        return StreamState(None)
    try:
        kind = ITSELF if isinstance(dataset, Iterator) else "dataset"
        return StreamState(dumps((kind, dataset.state_dict(), None)), over=over)
    except Exception as error:
        return StreamState(None, error=_said(dataset, error))


def load_dataset(dataset: Value, state: bytes | None) -> bytes | None:
    """Gives the data set its part of a stream's state. The caller calls ``iter()`` after that; for a data set that is
    its own iterator it is called here before, too.

    Returns the state that it had before; None if it has not told that, or the stream's state has no such part.
    """
    part = dataset_part(state)
    if part is None:
        return None
    before = told_of(dataset).state
    kind, own, _ = pickle.loads(part)
    if kind == ITSELF:
        iter(dataset)
    dataset.load_state_dict(own)
    return before


def _said(part: Value, error: Exception) -> str:
    return f"{type(part).__name__}.state_dict(): {type(error).__name__}: {error}"


class _Passes:
    """Stands for a stream's iterator, up to the first sample of an epoch that begins from a state of the end of the
    one before.

    Such a state may say that all has been yielded: the pass that finds nothing has then taken it up, and the next is
    the epoch's. Others (those of Hugging Face's data sets, unless ``set_epoch`` is called) say so for ever: these data
    sets get back what they had ``before`` it was loaded. A pass that has any is the epoch's, even if they are too few
    for a batch.
    """

    def __init__(self, stream: Stream, dataset: Value, before: bytes | None) -> None:
        self.samples = stream.samples
        self._stream, self._dataset, self._before = stream, dataset, before
        self._empty = 0  # passes that had none

    def __next__(self) -> Value:
        while True:
            try:
                sample = next(self.samples)
                break
            except StopIteration:
                if self._empty == 2:
                    raise
            if self._empty == 1:
                load_dataset(self._dataset, self._before)
            self._empty += 1
            self.samples = iter(self._dataset)
        self._stream.samples = self.samples
        return sample


class Stream:
    """The batches of a worker's own copy of the data set, from where its stream is to start.

    Raises ValueError where the stream has less than was delivered of it, was broken off, or may not be read again.
    """

    def __init__(self, job: Job, start: StreamState | None, goes_on: Callable[[], bool] = lambda: True) -> None:
        """``goes_on`` is asked at every sample that is read again; it returns False once the stream is not wanted."""
        # global generators that a stream without a state drew from while it was read again
        self.drew: set[str] = set()
        self.ended = False
        self.size = 0  # samples that the last batch took, with one that raised
        self._job, self._dataset = job, job.dataset
        self._batch_size, self._goes_on = job.batch_size, goes_on
        self._collate = no_end(job.collate_fn, "collate_fn")
        self._since = job.snapshot_every - 1  # batches since a state was reported
        self._failed = False  # the last batch raised
        self._raised = False  # in the stream itself
        stood = _global_states() if start is not None and start.state is None and start.batches else {}
        before = None
        if start is not None and not start.within_itself:
            before = load_dataset(job.dataset, start.state)
        self.samples: Iterator[Value] | _Passes = iter(job.dataset)
        if start is not None and start.over and not start.batches:
            self.samples = _Passes(self, job.dataset, before)
        if start is not None:
            self._read_again(start, stood)

    def _read_again(self, start: StreamState, stood: Mapping[str, Value]) -> None:
        if start.state is not None:
            kind, state, _ = pickle.loads(start.state)
            if kind == "iterator" or start.within_itself:
                self.samples.load_state_dict(state)  # type: ignore[union-attr]
        dropped, delivered = 0, start.again * self._batch_size
        for _ in range(start.again):
            data = self._batch_again()
            dropped += len(data)
            if not self._goes_on():
                raise ValueError(f"broken off: {dropped} of {delivered} samples of this stream were read again")
            if stood and data and self._job.own_collate:
                self._check_collate(data)
            if len(data) < self._batch_size:
                break
        if delivered and dropped + self._batch_size <= delivered:
            raise ValueError(
                f"the state has {start.again} batches of this stream delivered, but it yields only {dropped} "
                "samples; it belongs to another data set"
            )
        self.drew = _moved(stood)
        self.ended = start.ended or dropped < delivered

    def _batch_again(self) -> list[Value]:
        data = list[Value]()
        with suppress(StopIteration):
            while len(data) < self._batch_size and self._goes_on():
                data.append(next(self.samples))
        return data

    def _check_collate(self, data: list[Value]) -> None:
        """Raises ValueError where a collate_fn of the user's draws from a global generator: the stream may draw from
        it, too, so that other samples would come."""
        stand = _global_states()
        with suppress(Exception):  # it has raised before, or will again
            self._joined(data)
        if _moved(stand):
            raise ValueError(
                "the state cannot be taken up: its iterable data set has no state of its own, so that it is read "
                "again, and its collate_fn draws from a global generator, as the stream may. Give the data set, or its "
                "iterator, state_dict() and load_state_dict(), or the collate_fn a generator of its own"
            )

    def fetch(self) -> Value:
        """Returns the next batch, as PyTorch would fetch it. Raises StopIteration at the end."""
        self._failed = self._raised = False
        self.size = 0
        if self.ended:
            raise StopIteration
        data: list[Value] = []
        try:
            for _ in range(self._batch_size):
                try:
                    self.size = len(data) + 1
                    data.append(next(self.samples))
                except StopIteration:
                    self.size -= 1
                    self.ended = self._job.auto_collation
                    break
            if data and (len(data) == self._batch_size or not self._job.drop_last):
                return self._joined(data)
            self.size = 0
        except BaseException:
            self._failed = True
            self._raised = len(data) < self._batch_size  # else its collate_fn has: the stream is whole batches further
            raise
        raise StopIteration

    def _joined(self, data: list[Value]) -> Value:
        return self._collate(data if self._job.auto_collation else data[0])

    def told(self) -> StreamState:
        """Returns the stream's state after a batch; called once for each batch, and at the end.

        It comes without ``state`` if one was told less than ``snapshot_every_n_steps`` batches ago (``since``), or the
        stream has none.
        """
        part: Value = self.samples
        kind = "iterator"
        if isinstance(part, _Passes):
            part = part.samples
        if part is self._dataset:
            kind = ITSELF
        elif not is_stateful(part):
            part, kind = self._dataset, "dataset"
        if not is_stateful(part):
            return StreamState(None, self.ended, _RAISED if self._raised else None, size=self.size)
        # the next epoch may begin from an end, and of a batch that raised nobody knows how far the stream has come
        if self._since + 1 < self._job.snapshot_every and not (self.ended or self._failed):
            self._since += 1
            return StreamState(None, self.ended, since=self._since, size=self.size)
        try:
            own, beside = part.state_dict(), None
            if part is not self._dataset and is_stateful(self._dataset):
                part = self._dataset
                beside = part.state_dict()
            state = dumps((kind, own, beside))
        except Exception as error:
            return StreamState(None, self.ended, _said(part, error), size=self.size)
        self._since = 0
        return StreamState(state, self.ended, size=self.size)


def _global_states() -> dict[str, Value]:
    """Returns the states of the global generators; takes some 50 microseconds."""
    numpy: Value = np.random.get_state(legacy=False)
    return {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "Python": random.getstate(),
        "NumPy": pickle.dumps(numpy),
    }


def _moved(stood: Mapping[str, Value]) -> set[str]:
    """Returns which generators have moved since."""
    stand = _global_states() if stood else {}
    return {name for name, state in stood.items() if stand[name] != state}
