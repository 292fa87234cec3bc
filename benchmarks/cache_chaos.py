"""Chaos in a loader's cache: its process is killed, its disk fails, its directory vanishes; nothing wrong is delivered.

Each seed is a set of small files (every fourth of larger ones, so that copies go), a loader with a cache in memory, on
disk or both, and a few epochs: with workers of both kinds and any order of delivery, that persist or not, on a whole
set, a rank's share or draws by weights (whose generator somebody seeds between epochs), some with several sources for a
sample and some with a source that many have in common. In an epoch the reader process or a worker is killed
(SIGKILL), segments on disk are damaged, shortened and deleted, the directory vanishes or is in the way as a file, the
disk is full, the loop is left, a second iterator runs beside the first, or the rest is taken up by another loader from
a saved state. Between epochs files change, where the cache is on disk alone (copies in memory are of the loader's own
time, and stay).

After each epoch: every sample has come once, with its bytes; what is kept in memory between epochs is within the budget
and no more is held; what the directory takes on disk is within its budget. After the last: what no fault can have
hidden is hit, and no process is left.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from benchmarks import seeded_runs
from benchmarks.disk_faults import be_full, damage_segment
from minato_gpu import DataLoader, Source, read_bytes
from minato_gpu.sources.disk import LEAST_BUDGET

_PAGE = 4096
_BATCH = 4
_TIMEOUT_S = 60.0
_FAULTS = (
    "none",
    "reader killed",
    "reader killed",
    "worker killed",
    "segment",
    "directory vanished",
    "directory in the way",
    "disk full",
    "left",
    "second iterator",
    "resumed",
)
Rows = list[tuple[int, int]]


class Files:
    """Samples of one to three sources: a file of their own, a part of a shard, the same header for all; ``large`` ones
    do not all go into a directory."""

    def __init__(self, folder: Path, choose: random.Random, large: bool) -> None:
        self.folder, self.samples, self.scale = folder, choose.randint(5, 50), 40 if large else 1
        self.kinds = choose.choice(("own", "own", "part", "own header", "part own header", "shard"))
        (folder / "shard").write_bytes(choose.randbytes(40_000))
        for key in range(self.samples):
            self.change(key, choose)

    def change(self, key: int, choose: random.Random) -> None:
        """The file of a sample has other bytes from now on."""
        size = choose.choice((0, 1, 3000, 3000, 5000, 30_000))
        (self.folder / f"{key}").write_bytes(choose.randbytes(self.scale * size))

    def source(self, key: int) -> tuple[Source, ...]:
        """Where a sample's bytes lie."""
        found = []
        for kind in self.kinds.split():
            if kind == "own":
                found.append(Source(str(self.folder / f"{key}")))
            elif kind == "part":
                found.append(Source(str(self.folder / "shard"), 700 * key, 700 + key))
            else:
                found.append(Source(str(self.folder / "shard"), 0, 500 if kind == "header" else None))
        return tuple(found)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, key: int) -> tuple[int, int]:
        return key, sum(zlib.crc32(read_bytes(each).data) for each in self.source(key))

    def expected(self, keys: list[int]) -> Rows:
        """What these samples are now, without any loader."""
        return sorted(self[key] for key in keys)


@dataclass
class Result:
    """What was done in one run, and what was wrong, in words (nothing should be)."""

    injected: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    hits: int = 0
    disk_hits: int = 0
    removed: int = 0
    samples: int = 0

    def check(self, holds: bool, words: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.broken.append(words)


class Run:
    """One seed: a data set, a directory, a loader."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.choose = choose = random.Random(seed)
        self.result = Result()
        (folder / "files").mkdir()
        self.path = folder / "cache"
        self.data = Files(folder / "files", choose, large=seed % 4 == 3)
        self.disk = choose.choice((0, LEAST_BUDGET, LEAST_BUDGET))
        self.memory = 0 if self.disk and choose.random() < 0.4 else choose.choice((1, 5, 20, 1000)) * _PAGE
        self.persistent = choose.random() < 0.4
        self.arguments: dict[str, Any] = {
            "num_workers": choose.randint(1, 2),
            "worker_kind": choose.choice(("process", "process", "thread")),
            "in_order": choose.random() < 0.6,
            "persistent_workers": self.persistent,
            "timeout": _TIMEOUT_S,
        }
        if self.arguments["worker_kind"] == "process":
            self.arguments["on_worker_death"] = "replace"
        self.sampler: Any = self._sampler(choose.choice(("whole", "whole", "share", "share", "draws")), seed)
        self.loader = self.made()

    def _sampler(self, kind: str, seed: int) -> Any:
        """None for a shuffle of the whole set."""
        if kind == "share":
            data: Any = self.data
            ranks = self.choose.choice((2, 3))
            return DistributedSampler(data, ranks, self.choose.randrange(ranks), seed=seed)
        weights = [self.choose.expovariate(1.0) for _ in range(self.data.samples)]
        count = max(1, self.data.samples // self.choose.choice((1, 2, 4)))
        return None if kind == "whole" else WeightedRandomSampler(weights, count, generator=torch.Generator())

    def _begin(self, epoch: int) -> list[int]:
        """Tell the sampler which epoch follows; returns what it will yield."""
        if self.sampler is None:
            return list(range(len(self.data)))
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)
            return list(self.sampler)
        self.sampler.generator.manual_seed(epoch)
        keys = list(self.sampler)
        self.sampler.generator.manual_seed(epoch)
        return keys

    def made(self) -> DataLoader[Any]:
        """A loader with the run's arguments."""
        cache = {name: size for name, size in (("memory", self.memory), ("disk", self.disk)) if size}
        order: dict[str, Any] = {"sampler": self.sampler} if self.sampler is not None else {"shuffle": True}
        directory = self.path if self.disk else None
        data: Any = self.data
        generator = torch.Generator().manual_seed(1)
        return DataLoader(
            data, _BATCH, cache=cache, cache_dir=directory, generator=generator, **order, **self.arguments
        )

    def epochs(self) -> None:
        """All of them, with faults, and two without at the end."""
        for epoch in range(self.choose.randint(2, 4)):
            self.epoch(epoch, self.choose.choice(_FAULTS))
            if self.disk and not self.memory and not self.persistent:
                for key in self.choose.sample(range(len(self.data)), self.choose.randint(0, 3)):
                    self.data.change(key, self.choose)
                    self.result.injected["file changed"] += 1
        self._clear()
        if self.persistent:
            self.close()
        for epoch in (8, 8):
            self.epoch(epoch, "none")
        self.check_hits()
        self.close()

    def _clear(self) -> None:
        """Nothing is in the directory's way."""
        if self.path.is_file():
            self.path.unlink()

    def epoch(self, epoch: int, fault: str) -> None:
        """One epoch; the fault comes at some batch of it."""
        keys = self._begin(epoch)
        with _full_disk(self.choose) if fault == "disk full" else nullcontext():
            got, left = self._delivered(fault, self.choose.randint(0, max(0, len(keys) // _BATCH - 1)))
        self.result.injected[fault] += 1
        self.result.samples += len(got)
        wanted = self.data.expected(keys)
        if left:
            self.result.check(not Counter(got) - Counter(wanted), f"epoch {epoch}, {fault}: wrong or too many")
        else:
            self.result.check(sorted(got) == wanted, f"epoch {epoch}, {fault}: not what is there")
        self._check_budgets(fault)

    def _delivered(self, fault: str, at: int) -> tuple[Rows, bool]:
        got: Rows = []
        iterator = iter(self.loader)
        for number, batch in enumerate(iterator):
            got += _rows(batch)
            if number != at:
                continue
            if fault == "left":
                return got, True
            if fault == "second iterator":
                got_beside = [row for each in self.loader for row in _rows(each)]
                self.result.check(set(got_beside) <= set(self.data.expected(list(range(len(self.data))))), "beside")
            elif fault == "resumed":
                state = self.loader.state_dict()
                del iterator
                self.close()
                self._clear()
                self.loader = self.made()
                self.loader.load_state_dict(state)
                return got + [row for each in self.loader for row in _rows(each)], False
            else:
                self._do(fault, iterator)
        return got, False

    def _do(self, fault: str, iterator: Any) -> None:
        pump = iterator._engine.pump
        if fault == "reader killed":
            _kill(pump.reads.reader.process.pid)
        elif fault == "worker killed" and self.arguments["worker_kind"] == "process":
            _kill(self.choose.choice(pump.lanes["cpu"].pids))
        elif fault == "segment":
            damage_segment(self.path, self.choose, self.result.injected)
        elif fault.startswith("directory") and self.disk:
            shutil.rmtree(self.path, ignore_errors=True)
            if fault == "directory in the way" and not self.path.exists():
                self.path.touch()

    def _check_budgets(self, fault: str) -> None:
        kept = self.loader._session._kept_memory
        if kept is not None and not self.persistent:
            held = os.fstat(kept.fd).st_blocks * 512
            self.result.check(held <= self.memory, f"{fault}: {held} bytes in memory, of {self.memory}")
        if self.path.is_dir():
            walk = os.walk(self.path)  # which leaves out what a reader process removes meanwhile
            taken = sum(_disk_bytes(Path(at) / name) for at, _, names in walk for name in (".", *names))
            self.result.check(taken <= self.disk, f"{fault}: {taken} bytes on disk, of {self.disk}")

    def check_hits(self) -> None:
        """Of the last epoch, which had the order of the one before where that is not all of the set."""
        stats = self.loader.stats()
        self.result.check(stats["reads"]["process"] == "runs", "the reader process is lost")
        self.result.check(stats["reads"]["by_workers"] == 0, "a worker has read for itself")
        tiers = stats["cache"]
        self.result.hits = tiers.get("memory", {}).get("hits", 0)
        self.result.disk_hits = tiers.get("disk", {}).get("hits", 0)
        self.result.removed = tiers.get("disk", {}).get("removed", 0)
        if self.data.scale > 1:
            return  # not all is kept
        if not self.persistent and (not self.memory or self.memory >= 1000 * _PAGE):  # what goes is not written to disk
            self.result.check(stats["reads"]["reads"] == 0, f"{stats['reads']['reads']} reads of what was kept")

    def close(self) -> None:
        """End workers that are kept."""
        if self.loader._session.engine is not None:
            self.loader._session.engine.close()


def _rows(batch: Any) -> Rows:
    return list(zip(*(column.tolist() for column in batch), strict=True))


def _disk_bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def _full_disk(choose: random.Random) -> Iterator[None]:
    """The reader process is forked within this."""
    untouched = os.pwritev
    be_full(choose.randint(1, 30), choose)
    try:
        yield
    finally:
        os.pwritev = untouched


def run(seed: int, folder: Path) -> dict[str, Any]:
    """One run in a new directory of ``folder``, and its row."""
    begin, here = time.perf_counter(), psutil.Process()
    before = set(here.children(recursive=True))
    where = Path(tempfile.mkdtemp(dir=folder, prefix="cache-chaos-"))
    one = Run(seed, where)
    try:
        one.epochs()
    except Exception as error:
        one.result.check(False, f"{type(error).__name__}: {error}")
    one.close()
    result = one.result
    del one
    left = set(here.children(recursive=True)) - before
    _, alive = psutil.wait_procs(left, timeout=10)
    result.check(not alive, f"{len(alive)} processes are left")
    shutil.rmtree(where)
    return {
        "seed": seed,
        "injected": dict(result.injected),
        "samples": result.samples,
        "hits": result.hits,
        "disk_hits": result.disk_hits,
        "removed": result.removed,
        "broken": result.broken,
        "elapsed_s": time.perf_counter() - begin,
    }


main = seeded_runs.command("cache_chaos", run, ("samples", "hits", "disk_hits", "removed"), __doc__ or "")


if __name__ == "__main__":
    main()
