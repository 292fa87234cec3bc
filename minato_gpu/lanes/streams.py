"""A worker's own stream of an iterable data set, from its beginning or from where an earlier run left it.

A data set, or its iterator, with ``state_dict`` and ``load_state_dict`` goes on from its own state. Any other stream is
read again from its beginning, and as many batches as were delivered are dropped; that can be broken off at any sample.

Nobody can ask a worker for a state that is past, so it tells its own with every batch: a large one, while nobody saves,
with every few only. What came since is then read again (as in torchdata's loader between its snapshots).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from minato_gpu.snapshots import dumps


def is_stateful(thing: Any) -> bool:
    """Whether it can save and load its state."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


class StreamStart(NamedTuple):
    """Where one worker's stream begins: ``batches`` of it were delivered; ``state``: its own, pickled by the parent, as
    it was ``since`` batches before that."""

    batches: int
    state: bytes | None
    since: int = 0

    @property
    def again(self) -> int:
        """So many batches are read again and dropped."""
        return self.batches if self.state is None else self.since


class Told(NamedTuple):
    """What a worker says of its stream after a batch: ``state`` pickled (None: it cannot tell), ``ended``: no more.

    ``error``: what asking for the state raised; it matters to nobody but who saves. ``since``: the state is one of so
    many batches ago, and was told then.
    """

    state: bytes | None
    ended: bool
    error: str | None = None
    since: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the state that came with it."""
        return 0 if self.state is None or self.since else len(self.state)


LARGE = 1 << 14
"""Bytes of a state, pickled, that is not told with every batch while nobody saves: copying it takes too long."""
EVERY = 16
"""Batches between two such, and batches without a save after which nobody is taken to."""


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
        self._since: int | None = None  # batches since a large state was told, the last one
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
        if start.state is not None:
            kind, state = pickle.loads(start.state)
            if kind == "iterator":
                iterator.load_state_dict(state)
        delivered, dropped = start.again * samples, 0
        for _ in islice(iterator, delivered):
            dropped += 1
            if not goes_on():
                raise ValueError(f"broken off: {dropped} of {delivered} samples of this stream were read again")
        if delivered and dropped + samples <= delivered:
            raise ValueError(
                f"the state has {start.again} batches of this stream delivered, but it yields only {dropped} "
                "samples; it belongs to another data set"
            )
        self.fetcher.ended = dropped < delivered

    def fetch(self, samples: int) -> Any:
        """The next batch. Raises StopIteration at the end."""
        return self.fetcher.fetch([None] * samples)

    def told(self, *, exactly: bool = True) -> Told:
        """Where the stream stands now, one batch further than when it was last asked; unless ``exactly``, a large state
        may be one of some batches ago."""
        iterator, ended = self.fetcher.dataset_iter, bool(getattr(self.fetcher, "ended", False))
        since, self._since = self._since, None
        for name, part in (("iterator", iterator), ("dataset", self._dataset)):
            if is_stateful(part):
                if since is not None and since + 1 < EVERY and not exactly:
                    self._since = since + 1
                    return Told(None, ended, since=self._since)
                try:
                    state = dumps((name, part.state_dict()))
                except Exception as error:
                    return Told(None, ended, f"{type(part).__name__}.state_dict(): {type(error).__name__}: {error}")
                self._since = 0 if len(state) > LARGE else None
                return Told(state, ended)
        return Told(None, ended)
