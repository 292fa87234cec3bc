"""A worker's own stream of an iterable data set, from its beginning or from where an earlier run left it.

A data set, or its iterator, with ``state_dict`` and ``load_state_dict`` goes on from its own state. Any other stream is
read again from its beginning, and as many batches as were delivered are dropped; that can be broken off at any sample.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data._utils.fetch import _IterableDatasetFetcher


def is_stateful(thing: Any) -> bool:
    """Whether it can save and load its state."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


class StreamStart(NamedTuple):
    """Where one worker's stream begins: ``batches`` of it were delivered; ``state``: its own, pickled by the parent."""

    batches: int
    state: bytes | None


class Told(NamedTuple):
    """What a worker says of its stream after a batch: ``state`` pickled (None: it cannot tell), ``ended``: no more.

    ``error``: what asking for the state raised; it matters to nobody but who saves.
    """

    state: bytes | None
    ended: bool
    error: str | None = None


def _always() -> bool:
    return True


class Stream:
    """A worker's side: the batches of its own stream, from where it is to start."""

    def __init__(
        self,
        fetcher: Any,
        dataset: Any,
        start: StreamStart | None,
        samples: int,
        goes_on: Callable[[], bool] = _always,
    ) -> None:
        self.fetcher = fetcher
        self._dataset = dataset
        if start is not None:
            self._go_on(start, samples, goes_on)

    @classmethod
    def open(
        cls, job: Any, start: StreamStart | None, samples: int, goes_on: Callable[[], bool] = _always
    ) -> Stream:
        """The stream of a worker's copy of the data set; a batch takes ``samples``. ``goes_on`` is asked at every
        sample that is read again, and says no where nobody wants the stream any more.

        Raises ValueError where the stream has less than was delivered of it, or was broken off.
        """
        own = None if start is None or start.state is None else pickle.loads(start.state)
        if own is not None and own[0] == "dataset":
            job.dataset.load_state_dict(own[1])
        batches = getattr(job, "auto_collation", None)  # a Job's name for it; a DataLoader has it as PyTorch does
        batches = job._auto_collation if batches is None else batches
        fetcher = _IterableDatasetFetcher(job.dataset, batches, job.collate_fn, job.drop_last)
        return cls(fetcher, job.dataset, start, samples, goes_on)

    def _go_on(self, start: StreamStart, samples: int, goes_on: Callable[[], bool]) -> None:
        iterator = self.fetcher.dataset_iter
        if start.state is None:
            delivered = start.batches * samples
            dropped = 0
            for _ in islice(iterator, delivered):
                dropped += 1
                if not goes_on():
                    raise ValueError(f"broken off: {dropped} of {delivered} samples of this stream were read again")
            if dropped + samples <= delivered:
                raise ValueError(
                    f"the state has {start.batches} batches of this stream delivered, but it yields only {dropped} "
                    "samples; it belongs to another data set"
                )
            self.fetcher.ended = dropped < delivered
            return
        kind, state = pickle.loads(start.state)
        if kind == "iterator":
            iterator.load_state_dict(state)

    def fetch(self, samples: int) -> Any:
        """The next batch. Raises StopIteration at the end."""
        return self.fetcher.fetch([None] * samples)

    def told(self) -> Told:
        """Where the stream stands now."""
        iterator, ended = self.fetcher.dataset_iter, bool(getattr(self.fetcher, "ended", False))
        for name, part in (("iterator", iterator), ("dataset", self._dataset)):
            if is_stateful(part):
                try:
                    return Told(pickle.dumps((name, part.state_dict())), ended)
                except Exception as error:
                    return Told(None, ended, f"{type(part).__name__}.state_dict(): {type(error).__name__}: {error}")
        return Told(None, ended)
