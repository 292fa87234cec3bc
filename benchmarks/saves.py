"""What ``state_dict()`` costs when it is called after every batch, and what it costs those who never call it.

A row for each way back to the middle of an epoch, at windows of 256 and of 4096 samples: torch's sampler, which is
drawn again, in order and out of order; a sampler with a small state of its own, in a sequence and in a permutation (of
one that may repeat an index, as far as the loader knows, a state says which have come: a bit for each), and with one of
a megabyte; one of unknown kind, whose remaining order is stored; an iterable data set with a small state, and with one
of a megabyte. Batches of 64 numbers, two workers.

``save_p50_us`` and ``save_p99_us``: microseconds of one call, of ``saves`` calls; ``save_cpu_p99_us``: while its thread
was on a core, which two workers and a pump thread want as well. ``state_bytes``: the last state as
JSON; ``own_bytes``: without the states of generators, sampler and data set. ``batch_us``: the mean time between two
batches of an epoch in which nobody saves; ``saved_batch_us``: the same where each is followed by a save, without that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from time import perf_counter, thread_time
from typing import Any

import click
import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from benchmarks import report
from minato_gpu import DataLoader

WINDOWS = (256, 4096)
_BATCH = 64
_WORKERS = 2
_COLUMNS = (
    *("mode", "window", "save_p50_us", "save_p99_us", "save_cpu_p99_us", "state_bytes", "own_bytes"),
    *("batch_us", "batch_spread_us", "saved_batch_us"),
)


class Numbers:
    """Sample ``n`` is n."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, n: int) -> int:
        return n


class Stateful:
    """A sampler with a state, to which ``weights`` numbers belong that it changes as it goes; ``step``: between indices
    that follow each other, modulo the length."""

    def __init__(self, length: int, weights: int = 0, step: int = 1) -> None:
        self.length = length
        self.step = step
        self.at = 0
        self.weights = [0.5] * weights

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
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


class Unknown:
    """A sampler without a state."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Stream(IterableDataset[int]):
    """A stream with a state, to which ``weights`` numbers belong, shared out among workers."""

    def __init__(self, length: int, weights: int = 0) -> None:
        self.length = length
        self.at = 0
        self.weights = [0.5] * weights

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        workers = 1 if info is None else info.num_workers
        while self.at < self.length // workers:
            self.at += 1
            if self.weights:
                self.weights[self.at % len(self.weights)] += 1.0
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        """How far it has come."""
        return {"at": self.at, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.at, self.weights = state["at"], list(state["weights"])


_MEGABYTE = (1 << 20) // 8
_PRIME = 7919
MODES: dict[str, Callable[[int], dict[str, Any]]] = {
    "in order": lambda n: {"dataset": Numbers(n), "shuffle": True},
    "out of order": lambda n: {"dataset": Numbers(n), "shuffle": True, "in_order": False},
    "sampler's state": lambda n: {"dataset": Numbers(n), "sampler": Stateful(n)},
    "sampler's state, permuted": lambda n: {"dataset": Numbers(n), "sampler": Stateful(n, step=_PRIME)},
    "sampler's state, 1 MB": lambda n: {"dataset": Numbers(n), "sampler": Stateful(n, _MEGABYTE)},
    "stored order": lambda n: {"dataset": Numbers(n), "sampler": Unknown(n)},
    "stream's state": lambda n: {"dataset": Stream(n)},
    "stream's state, 1 MB": lambda n: {"dataset": Stream(n, _MEGABYTE)},
}


def _loader(mode: str, window: int, batches: int) -> Any:
    factor = window // _BATCH // _WORKERS
    return DataLoader(
        **MODES[mode](batches * _BATCH), batch_size=_BATCH, num_workers=_WORKERS, prefetch_factor=max(1, factor)
    )


def _unsaved_us(mode: str, window: int, batches: int) -> float:
    """Microseconds for each batch of an epoch in which nobody saves, from the first batch on."""
    iterator = iter(_loader(mode, window, batches))
    next(iterator)
    begin, count = perf_counter(), 0
    for _ in iterator:
        count += 1
    return 1e6 * (perf_counter() - begin) / count


def _saved(mode: str, window: int, batches: int) -> tuple[list[float], list[float], float, Any]:
    """Microseconds of each save of an epoch, those on a core, those of each batch beside, and a state near the end."""
    loader = _loader(mode, window, batches)
    iterator = iter(loader)
    next(iterator)
    saves: list[float] = []
    on_core: list[float] = []
    begin, state = perf_counter(), None
    for _ in range(batches - 2):
        spent, before = thread_time(), perf_counter()
        state = loader.state_dict()
        saves.append(1e6 * (perf_counter() - before))
        on_core.append(1e6 * (thread_time() - spent))
        next(iterator)
    whole = 1e6 * (perf_counter() - begin)
    return saves, on_core, (whole - sum(saves)) / len(saves), state


def own_bytes(state: dict[str, Any]) -> int:
    """Bytes of a state as JSON without what samplers, generators and data sets have put into it."""
    theirs = ("state", "batches", "occurrences", "generators")
    source = {name: value for name, value in state["source"].items() if name not in theirs}
    if "streams" in source:
        source["streams"] = [{**stream, "state": None} for stream in source["streams"]]
    return len(json.dumps({**state, "generators": {}, "global": {}, "source": source}))


def row(mode: str, window: int, batches: int, repetitions: int) -> dict[str, Any]:
    """One row; see the head of this module."""
    saves: list[float] = []
    on_core: list[float] = []
    unsaved, beside = [], []
    state: Any = None
    for _ in range(repetitions):
        unsaved.append(_unsaved_us(mode, window, batches))
        taken, spent, other, state = _saved(mode, window, batches)
        saves += taken
        on_core += spent
        beside.append(other)
    p50, p99 = np.percentile(saves, [50, 99])
    return {
        "mode": mode,
        "window": window,
        "save_p50_us": float(p50),
        "save_p99_us": float(p99),
        "save_cpu_p99_us": float(np.percentile(on_core, 99)),
        "state_bytes": len(json.dumps(state)),
        "own_bytes": own_bytes(state),
        **report.summarise("batch", unsaved, "_us"),
        "saved_batch_us": report.median(beside),
        "saves": len(saves),
        "repetitions": repetitions,
    }


@click.command(help=__doc__)
@report.command
def main(json_path: str | None, quick: bool, repetitions: int | None) -> None:
    batches, repetitions = (24 if quick else 400), repetitions or (1 if quick else 3)
    rows = []
    for mode in MODES:
        for window in WINDOWS:
            report.progress(f"{mode}, window {window}")
            rows.append(row(mode, window, batches, repetitions))
    settings = {"batch_size": _BATCH, "workers": _WORKERS, "batches": batches, "quick": quick}
    report.publish(report.document("saves", settings, rows), json_path, _COLUMNS)


if __name__ == "__main__":
    main()
