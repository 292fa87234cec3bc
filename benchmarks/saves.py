"""What ``state_dict()`` costs when it is called after every batch, and what it costs those who never call it.

A row for each way back to the middle of an epoch, at windows of 256 and of 4096 samples: torch's sampler, which is
drawn again, in order and out of order; a sampler with a small state of its own, in a sequence and in a permutation (a
state holds the keys of the window and, as this one may repeat an index, which have come: a bit for each), and with one
of a megabyte; one of unknown kind, whose remaining order is stored; an iterable data set with a small state, and with
one of a megabyte. Batches of 64 numbers, two workers.

``save_p50_us`` and ``save_p99_us``: microseconds of one call; ``save_cpu_p99_us``: while its thread was on a core,
which two workers and a pump thread want as well. ``state_bytes``: the last state as JSON; ``own_bytes``: without the
states of generators, sampler and data set. ``batch_us``: the mean time between two batches of an epoch in which nobody
saves; ``saved_batch_us``: the same where each is followed by a save, without that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from benchmarks import report
from minato_gpu import DataLoader

WINDOWS = (256, 4096)
_BATCH, _WORKERS = 64, 2
_MEGABYTE = (1 << 20) // 8
_PRIME = 7919


class Counting:
    """Counts to ``length``, with a state to which ``weights`` numbers belong that it changes as it goes; ``step``:
    between indices that follow each other, modulo the length."""

    def __init__(self, length: int, weights: int = 0, step: int = 1) -> None:
        self.length, self.step, self.at = length, step, 0
        self.weights = [0.5] * weights

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()  # None but for a stream in a worker
        end = self.length // (1 if info is None else info.num_workers)
        while self.at < end:
            self.at += 1
            if self.weights:
                self.weights[self.at % len(self.weights)] += 1.0
            yield (self.at - 1) * self.step % self.length
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        """Its own lists, not copies of them."""
        return {"at": self.at, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.at, self.weights = state["at"], list(state["weights"])


class Stateful(Counting):
    """A sampler with a state."""

    def __len__(self) -> int:
        return self.length


class Stream(Counting, IterableDataset[int]):
    """A stream with a state, shared out among workers."""


class Unknown:
    """A sampler without a state."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


MODES: dict[str, Callable[[int], dict[str, Any]]] = {
    "in order": lambda n: {"dataset": range(n), "shuffle": True},
    "out of order": lambda n: {"dataset": range(n), "shuffle": True, "in_order": False},
    "sampler's state": lambda n: {"dataset": range(n), "sampler": Stateful(n)},
    "sampler's state, permuted": lambda n: {"dataset": range(n), "sampler": Stateful(n, step=_PRIME)},
    "sampler's state, 1 MB": lambda n: {"dataset": range(n), "sampler": Stateful(n, _MEGABYTE)},
    "stored order": lambda n: {"dataset": range(n), "sampler": Unknown(n)},
    "stream's state": lambda n: {"dataset": Stream(n)},
    "stream's state, 1 MB": lambda n: {"dataset": Stream(n, _MEGABYTE)},
}


class Run(NamedTuple):
    """Of an epoch with saves and of one without."""

    save_p50_us: float
    save_p99_us: float
    save_cpu_p99_us: float
    batch_us: float
    saved_batch_us: float
    state_bytes: int
    own_bytes: int


def _begun(mode: str, window: int, batches: int) -> tuple[Any, Iterator[Any]]:
    """A loader, and its epoch from the second batch on."""
    loader: Any = DataLoader(
        **MODES[mode](batches * _BATCH),
        batch_size=_BATCH,
        num_workers=_WORKERS,
        prefetch_factor=max(1, window // _BATCH // _WORKERS),
    )
    iterator = iter(loader)
    next(iterator)
    return loader, iterator


def run(mode: str, window: int, batches: int) -> Run:
    """Two epochs, each by a loader of its own."""
    _, iterator = _begun(mode, window, batches)
    begin, count = perf_counter(), 0
    for _ in iterator:
        count += 1
    batch_us = 1e6 * (perf_counter() - begin) / count
    loader, iterator = _begun(mode, window, batches)
    saves, on_core, state = list[float](), list[float](), {}
    begin = perf_counter()
    for _ in range(batches - 2):
        spent, before = thread_time(), perf_counter()
        state = loader.state_dict()
        saves.append(1e6 * (perf_counter() - before))
        on_core.append(1e6 * (thread_time() - spent))
        next(iterator)
    saved_batch_us = (1e6 * (perf_counter() - begin) - sum(saves)) / len(saves)
    p50, p99 = (float(each) for each in np.percentile(saves, [50, 99]))
    cpu_p99 = float(np.percentile(on_core, 99))
    return Run(p50, p99, cpu_p99, batch_us, saved_batch_us, len(json.dumps(state)), own_bytes(state))


def own_bytes(state: dict[str, Any]) -> int:
    """Bytes of a state as JSON without what samplers, generators and data sets have put into it."""
    theirs = ("state", "batches", "occurrences", "generators")
    source = {name: value for name, value in state["source"].items() if name not in theirs}
    if "streams" in source:
        source["streams"] = [{**stream, "state": None} for stream in source["streams"]]
    return len(json.dumps({**state, "generators": {}, "global": {}, "source": source}))


@report.benchmark("saves", 3, batch_size=_BATCH, workers=_WORKERS)
def main(quick: bool, repetitions: int) -> Iterator[dict[str, Any]]:
    batches = 24 if quick else 400
    for mode in MODES:
        for window in WINDOWS:
            report.progress(f"{mode}, window {window}")
            runs = [run(mode, window, batches) for _ in range(repetitions)]
            yield {"mode": mode, "window": window, **report.figures(runs), "repetitions": repetitions}


if __name__ == "__main__":
    main()
