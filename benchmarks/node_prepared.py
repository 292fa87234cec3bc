"""Jobs on one host that prepare the same samples, each for itself or once for all (``share`` with ``share_budget``).

Four jobs train at once on the same samples in the same order, with a worker each: computed samples (10 ms of CPU, 150
KB), or photographs that a pipeline decodes, crops and normalises (float32, 600 KB); every batch is read by its job, and
all jobs must have read the same. ``prepared_share``: samples prepared, as a multiple of the set; ``cpu_s``: of all
processes, for a thousand samples of the set, which does not depend on what else the machine does. In the last case the
first job's steps take twice as long as the others', and all wait for half of the time: ``samples_per_s`` is that of the
slowest of the others. TensorSocket (``peers/tensorsocket.py``) takes part where it is installed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import xxhash
from torch.utils.data import DataLoader as TorchDataLoader

from benchmarks.isolate import isolated, together, tree_cpu_s
from benchmarks.node_share import BATCH, JOBS
from benchmarks.peers import tensorsocket
from benchmarks.turns import Row, measured_rows, ratio_columns
from benchmarks.work import compute
from minato_gpu import DataLoader
from pipelines import image_classification

SECONDS, NBYTES = 10e-3, 150_000
_AHEAD = 4  # batches


class Counted:
    """``samples`` samples, in a folder. A file grows by a byte with each that is prepared."""

    def __init__(self, folder: Path, samples: int) -> None:
        self.folder, self.samples = folder, samples
        self.log = str(folder / "prepared")

    def __len__(self) -> int:
        return self.samples

    def note(self) -> None:
        """One more is prepared."""
        file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b".")
        os.close(file)


class Computed(Counted):
    """Numbers that are drawn, after ``SECONDS`` of computing."""

    def __getitem__(self, key: int) -> torch.Tensor:
        self.note()
        compute(SECONDS)
        return torch.rand(NBYTES // 4)


class Photographs(Counted):
    """The example photographs, over and over, each with a crop of its own."""

    def __init__(self, folder: Path, samples: int) -> None:
        super().__init__(folder, samples)
        image_classification.example_data(folder / "photographs")
        self.files = image_classification.ImageFolder(folder / "photographs")
        self.pipeline = image_classification.build()

    def __getitem__(self, key: int) -> Any:
        self.note()
        return self.pipeline.run(self.files[key % len(self.files)], key)["image"]


class Sharing(NamedTuple):
    """Loaders of so many ``jobs``. ``slow``: how many times longer the first one's steps are than the others', which
    leave half of the cores idle. ``loader``: None for TensorSocket, whose producer has a worker for each job."""

    name: str
    loader: Callable[..., Any] | None
    arguments: dict[str, Any]
    slow: float = 0.0
    jobs: int = JOBS


class Prepared(NamedTuple):
    """What came of a run."""

    samples_per_s: float  # of the slowest job (or of the slowest of the fast ones)
    prepared_share: float
    cpu_s: float


SHARED = {"share": "prepared", "share_budget": "1GB"}
LOADERS = (
    Sharing("pytorch", TorchDataLoader, {}),
    *([Sharing("tensorsocket", None, {})] if find_spec(tensorsocket.PACKAGE) else []),
    Sharing("minato", DataLoader, {}),
    Sharing("minato, share", DataLoader, SHARED),
)
CASES: dict[str, tuple[type[Counted], tuple[Sharing, ...]]] = {
    "prepared_computed": (Computed, LOADERS),
    "prepared_photographs": (Photographs, LOADERS),
    "prepared_one_slow": (
        Computed,
        (Sharing("all alike", DataLoader, SHARED, 1.0), Sharing("one twice as slow", DataLoader, SHARED, 2.0)),
    ),
}

EIGHT: Mapping[str, tuple[type[Counted], tuple[Sharing, ...]]] = {
    "eight jobs": (Computed, tuple(each._replace(jobs=8) for each in LOADERS[-2:]))
}


def run(kind: type[Counted], sharing: Sharing, samples: int) -> Prepared:
    """Run them to the end of an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        data = kind(Path(folder), samples)
        with nullcontext() if sharing.loader else tensorsocket.producer(data, BATCH, sharing.jobs) as ports:
            results = together(sharing.jobs, _train, sharing, data, ports)
            spent_s = tree_cpu_s()
        prepared = Path(data.log).stat().st_size
    if len({digest for _, _, digest, _ in results}) != 1:
        raise AssertionError("jobs have not read the same")
    rates = [rate for at, rate, _, _ in results if at or not sharing.slow]
    cpu_s = spent_s + max(reader_s for *_, reader_s in results)
    return Prepared(min(rates), prepared / samples, 1000 * cpu_s / samples)


def _train(at: int, barrier: Barrier, sharing: Sharing, data: Counted, ports: Any) -> tuple[int, float, str, float]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    arguments: dict[str, Any] = {"shuffle": True, "num_workers": 1, "prefetch_factor": _AHEAD, "generator": generator}
    if sharing.loader is None:
        loader: Any = tensorsocket.consumer(ports, BATCH)
    else:
        loader = sharing.loader(data, BATCH, **arguments, **sharing.arguments)
    # once shared, all of the work takes SECONDS a sample; steps last four times as long as a core needs for a batch
    step_s = BATCH * SECONDS * (sharing.slow if at == 0 else 1.0) if sharing.slow else 0.0
    barrier.wait()
    begin, digest, received = time.perf_counter(), xxhash.xxh3_128(), 0
    for batch in loader:
        received += len(batch)
        digest.update(batch.numpy().data)
        time.sleep(step_s)
    elapsed = time.perf_counter() - begin
    reader_s = 0.0
    if sharing.arguments:
        times = psutil.Process(loader._session.readers._reader.pid).cpu_times()
        reader_s = times.user + times.system
    return at, received / elapsed, digest.hexdigest(), reader_s


def prepared(
    *, steps: int, repetitions: int, cases: Mapping[str, tuple[type[Counted], tuple[Sharing, ...]]] = CASES
) -> Iterator[Row]:
    """A row for each case and loader, of so many batches."""
    samples = BATCH * steps
    for case, (kind, loaders) in cases.items():

        def measure(sharing: Sharing, kind: type[Counted] = kind) -> Prepared:
            return isolated(run, kind, sharing, samples, timeout_s=900)

        rows, runs = measured_rows(case, loaders, repetitions, measure)
        base = [each.samples_per_s for each in runs[loaders[-2].name]]
        for row, sharing in zip(rows, loaders, strict=True):
            rates = [each.samples_per_s for each in runs[sharing.name]]
            compared = ratio_columns("ratio", rates, base) if rates and len(rates) == len(base) else {}
            yield row | {"clients": sharing.jobs} | compared
