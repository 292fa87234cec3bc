"""What one chaos run is to be, drawn from its seed: the loader, the data set, and what is done to them.

The data set keeps its counters in memory that all processes of the run share, so that a fault that is to strike once
strikes once, whichever worker it strikes.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, RandomSampler

from benchmarks.chaos_samplers import Eager, Order, Read, Streamed, Streaming, torchdatas
from minato_gpu import DataLoader, Field, Pipeline, Stage

_FORK = multiprocessing.get_context("fork")
_ALWAYS = 1 << 20
_WORDS = 250
MOST_BYTES = 8 * 3 * _WORDS + 1024  # of one sample, with what it is wrapped in where it travels as an object
HANG_S = 0.5
LETHAL = ("killed", "segmentation fault", "full shared memory", "exit", "hang")
HARMLESS = ("raise", "slow")
FAULTS = (*LETHAL, *HARMLESS, "corrupt output", "killed from outside", "resume")


class Corrupt(Exception):
    """A sample that was injected to fail."""


def _beyond_memory() -> None:
    """What a write to shared memory does that has no memory left behind it."""
    fd = os.memfd_create("chaos")
    os.ftruncate(fd, mmap.PAGESIZE)
    page = mmap.mmap(fd, mmap.PAGESIZE)
    os.ftruncate(fd, 0)
    page[0] = 1


STATEFUL = ["state", "state, repeats", "torchdata distributed", "torchdata random"]
STREAMS = {"state": Streamed, "iterator's state": Streaming, "read again": Read}

_DO: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": lambda: ctypes.string_at(0),
    "full shared memory": _beyond_memory,
    "exit": lambda: os._exit(7),
    "hang": lambda: threading.Event().wait(),
    "slow": lambda: sum(range(300_000)),
}


class Plan:
    """One run. ``steps``: after how many batches the run is given up, saved and taken up by another loader, each time
    with the next number of ``workers``; ``murder``: at which batch a worker is killed from outside, or None;
    ``epochs``: how many are run; ``stream``: how an iterable data set, if it is one, goes on after a resume: such a
    one loses its stream with its worker, so that only slow samples and resumes happen to it."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.samples = rng.randint(16, 90)
        self.batch = rng.choice([1, 3, 4, 8])
        self.threads = rng.random() < 0.12
        self.content = rng.choice(["rows", "rows", "ragged", "pipeline"])
        self.lateness = rng.choice([0, 0, 1, 3, 8])
        self.sampling = rng.choice(["shuffled", "shuffled", "repeats", "unknown"])
        self.budget = rng.choice([None, None, 3_000, 40_000])  # bytes; the less is not enough for one sample of some
        self.steps = [rng.randint(0, 6) for _ in range(rng.choice([0, 0, 1, 1, 3]))]
        self.workers = [rng.randint(1, 3) for _ in range(len(self.steps) + 1)]
        self.murder = None if self.threads or rng.random() < 0.6 else rng.randint(1, 8)
        self.faults = self._faults(rng)
        self.epochs = 1
        self.persistent = False
        self.stream: str | None = None
        self._vary(random.Random(-1 - seed))

    def _vary(self, rng: random.Random) -> None:
        """What came later to these plans, and leaves the draws before as they are."""
        self.epochs = rng.choice([1, 1, 2, 3])
        self.persistent = rng.random() < 0.3
        self.sampling = rng.choice([self.sampling] * len(STATEFUL) + STATEFUL)
        if rng.random() < 0.85:
            return
        self.stream, self.sampling = rng.choice(sorted(STREAMS)), "stream"
        self.content = "rows" if self.content == "pipeline" else self.content
        self.workers = [1 if self.threads else self.workers[0]] * len(self.workers)
        self.faults = {key: fault for key, fault in self.faults.items() if fault[0] == "slow"}
        self.murder, self.budget = None, None

    def _faults(self, rng: random.Random) -> dict[int, tuple[str, int]]:
        """By key: what happens to its sample, and how often."""
        kinds = [*HARMLESS, *HARMLESS, *(() if self.threads else LETHAL)]
        if self.content == "pipeline":
            kinds.append("corrupt output")
        chosen = rng.choices(kinds, k=rng.choice([0, 2, 3, 5]))
        keys = rng.sample(range(self.samples), len(chosen))
        faults: dict[int, tuple[str, int]] = {}
        for key, kind in zip(keys, chosen, strict=True):
            if kind == "hang" and any(known == "hang" for known, _ in faults.values()):
                kind = "killed"  # one to a run: each takes its time
            faults[key] = (kind, rng.choice([1, 1, _ALWAYS]) if kind in LETHAL else _ALWAYS)
        return faults

    def keys(self, *kinds: str, always: bool) -> set[int]:
        """The keys with such faults that strike always, or once."""
        return {key for key, (kind, n) in self.faults.items() if kind in kinds and (n == _ALWAYS) == always}

    @property
    def doomed(self) -> set[int]:
        """Keys of samples that cannot be prepared."""
        return self.keys("raise", "corrupt output", *LETHAL, always=True)

    @property
    def risky(self) -> set[int]:
        """Keys of samples that kill once: a second death, from outside, may make them bad samples."""
        return self.keys(*LETHAL, always=False)

    def sampler(self) -> Any:
        """The same order each time."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.sampling == "shuffled":
            return RandomSampler(range(self.samples), generator=generator)
        if self.sampling in STATEFUL:
            own = Eager(self.samples, generator, repeats=self.sampling.endswith("repeats"))
            return own if self.sampling.startswith("state") else torchdatas(self.sampling, self.samples, generator)
        drawn = RandomSampler(range(self.samples), replacement=self.sampling == "repeats", generator=generator)
        return Order(list(drawn)) if self.sampling == "unknown" else list(drawn)

    def loader(self, dataset: Dataset[Any], workers: int) -> Any:
        """A loader of the plan's kind."""
        order: dict[str, Any] = {"in_order": False, "max_lateness": self.lateness} if self.lateness else {}
        process: dict[str, Any] = {} if self.threads else {"on_worker_death": "replace", "hang_timeout": HANG_S}
        if self.stream is None:
            order.update(sampler=self.sampler(), on_error="skip", **process)
        return DataLoader(
            dataset,
            self.batch,
            num_workers=workers,
            persistent_workers=self.persistent,
            collate_fn=list if self.content == "ragged" else None,
            pipeline=_PIPELINE if self.content == "pipeline" else None,
            timeout=30,
            worker_kind="thread" if self.threads else "process",
            host_memory_budget=self.budget,
            generator=torch.Generator().manual_seed(self.seed + 1),
            **order,
        )

    def data(self, *, faults: bool) -> Any:
        """The plan's data set."""
        data = Faulty(self, faults=faults)
        return data if self.stream is None else STREAMS[self.stream](data)


class Faulty(Dataset[Any]):
    """The plan's samples. ``begun`` counts how often each was begun, ``struck`` how often its fault has struck."""

    def __init__(self, plan: Plan, *, faults: bool) -> None:
        self.plan = plan
        self.faults = plan.faults if faults else {}
        self.begun = _FORK.Array("q", plan.samples, lock=False)
        self.struck = _FORK.Array("q", plan.samples, lock=False)

    def __len__(self) -> int:
        return self.plan.samples

    def __getitem__(self, key: int) -> Any:
        self.begun[key] += 1
        kind, times = self.faults.get(key, ("", 0))
        if self.struck[key] < times:
            self.struck[key] += 1
            if kind == "raise":
                raise Corrupt(f"sample {key} is broken")
            if kind in _DO:
                _DO[kind]()
        if self.plan.content == "pipeline":
            return {"key": np.float64(key), "corrupt": kind == "corrupt output"}
        # threads share the global generators: their draws belong to no sample
        drawn = 0.0 if self.plan.threads else float(torch.rand((), dtype=torch.float64))
        length = _WORDS * (1 + key % 3 if self.plan.content == "ragged" else 1)
        sample = torch.full((length,), drawn, dtype=torch.float64)
        sample[0] = key
        return sample


def _mix(fields: Any, drawn: Any) -> Any:
    value = np.full(_WORDS, drawn["shift"], np.float64)
    value[0] = fields["key"]
    return {"value": value.astype(np.int8) if fields["corrupt"] else value}


def _draw(rng: np.random.Generator, meta: Any) -> dict[str, Any]:
    return {"shift": rng.random()}


_PIPELINE = Pipeline(
    (Stage("mix", ("key", "corrupt"), {"value": Field(np.float64, (_WORDS,))}, cpu=_mix, draw=_draw),),
    outputs=("value",),
)
