"""Files that the page cache does not have: a folder of photographs of about 100 KB, read from the disk of this machine.

Before each run all files are thrown out of the page cache, and ``cachestat`` must find nothing of them; a run is one
epoch, shuffled, by one loader in a process of its own. ``decoded``: samples are decoded and resized, as for training.
``bytes``: they are only read, so that what the loaders themselves cost is most of it. Every sample carries a checksum
of its bytes, which is compared.

    samples_per_s     of the whole epoch, the start of the workers included
    cpu_us            CPU microseconds for a sample, of all processes together, their start included
    ratio_to_best     this loader's rate over that of the best peer, repetition by repetition; with its 95 % interval
    cpu_ratio         the same of ``cpu_us``, over the peer that is the fastest

Peers in any order count for both of ours. ``16 threads``: ``__getitems__`` reads the files of a batch with sixteen
threads in each worker.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from benchmarks import report
from benchmarks.compare.ratios import OURS
from benchmarks.data.detection import picture
from benchmarks.isolate import cached_pages, evict, isolated, tree_cpu_s
from benchmarks.peers import Job, Reader
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.peers.spdl import SpdlPool, SpdlSharded, SpdlSubprocess
from benchmarks.peers.torchdata import TorchdataNodes
from benchmarks.turns import measured_rows, present, ratio_columns
from minato_gpu import Source, read_bytes
from minato_gpu.util.messages import from_extra
from pipelines.image_classification import ImageFolder

with from_extra("bench"):
    import cv2

THREADS = 16
BATCH = 64
_SHAPE = (420, 560)  # such a photograph has about 100 KB
_UNLIKE = 16  # pictures; their files follow each other
_CLASSES = 10
_ATTEMPTS = 100  # a process that was killed may still be reading
_MASK = (1 << 63) - 1
_pool: ThreadPoolExecutor | None = None
Int64 = NDArray[np.int64]


class Photographs:
    """Sample k is the file's number, the checksum of its bytes and, ``decoded``, the sum of its pixels: int64 (3,)."""

    def __init__(self, folder: Path, *, decoded: bool) -> None:
        self.files = ImageFolder(folder)
        self.decoded = decoded

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: int) -> Int64:
        return self._prepared(key, read_bytes(self.files.paths[key]))

    def _prepared(self, key: int, data: NDArray[np.uint8]) -> Int64:
        pixels = 0
        if self.decoded:
            image: Any = cv2.imdecode(data, cv2.IMREAD_COLOR)
            pixels = int(cv2.sumElems(cv2.resize(image, (224, 224), interpolation=cv2.INTER_AREA))[0])
        return np.array([key, xxh3_64_intdigest(data.data) & _MASK, pixels], np.int64)


class InThreads(Photographs):
    """Reads the files of a batch with sixteen threads."""

    def __getitems__(self, keys: list[int]) -> list[Int64]:
        global _pool
        _pool = _pool or ThreadPoolExecutor(THREADS)
        read = _pool.map(read_bytes, [self.files.paths[key] for key in keys])
        return [self._prepared(key, data) for key, data in zip(keys, read, strict=True)]


class Declared(Photographs):
    """Says where the bytes lie."""

    def source(self, key: int) -> Source:
        """The file."""
        return self.files.source(key)


READERS = (
    Reader(PyTorch("pytorch"), Photographs),
    Reader(PyTorch("pytorch, 16 threads a worker", prefetch_factor=4), InThreads),
    Reader(SpdlPool("spdl threads", processes=False, concurrency=THREADS), Photographs),
    Reader(SpdlPool("spdl threads by batch", processes=False, by_batch=True), Photographs),
    Reader(SpdlPool("spdl processes", processes=True, by_batch=True, concurrency=4), Photographs),
    Reader(SpdlSubprocess("spdl threads in a subprocess", by_batch=True), Photographs),
    Reader(SpdlSharded("spdl plain subprocesses"), Photographs),
    Reader(TorchdataNodes("torchdata threads", processes=False, by_batch=True), Photographs),
    Reader(TorchdataNodes("torchdata processes", processes=True, by_batch=True), Photographs),
    Reader(Minato("minato_gpu in order"), Declared),
    Reader(Minato("minato_gpu bounded", in_order=False), Declared),
    Reader(Minato("minato_gpu in order, not declared"), Photographs),
)


class Run(NamedTuple):
    """Of one epoch."""

    samples_per_s: float
    cpu_us: float
    first_batch_s: float


def write(folder: Path, count: int) -> Int64:
    """Write so many photographs in class folders; returns the checksum of each, in the data set's order."""
    rng = np.random.default_rng(0)
    encoded = [cv2.imencode(".jpg", picture(*_SHAPE, rng), [cv2.IMWRITE_JPEG_QUALITY, 95])[1] for _ in range(_UNLIKE)]
    for number in range(count):
        where = folder / f"class-{number % _CLASSES}" / f"{number:06}.jpg"
        where.parent.mkdir(exist_ok=True)
        where.write_bytes(encoded[number % _UNLIKE].data)
    paths = ImageFolder(folder).paths
    sums = [xxh3_64_intdigest(encoded[int(Path(path).stem) % _UNLIKE].data) & _MASK for path in paths]
    return np.array(sums, np.int64)


def make_cold(folder: Path) -> None:
    """Throw all files out of the page cache. Raises RuntimeError where some stay, or the kernel does not say."""
    for path in folder.rglob("*.jpg"):
        fd = os.open(path, os.O_RDWR)
        try:
            os.fsync(fd)
            for _ in range(_ATTEMPTS):
                evict(fd)
                if cached_pages(fd) == 0:
                    break
                sleep(0.01)
            else:
                raise RuntimeError(f"{path} is not known to be out of the page cache")
        finally:
            os.close(fd)


def run(folder: Path, decoded: bool, reader: Reader, workers: int, expected: Int64) -> Run:
    """One epoch, which must hold every sample once, with the bytes that were written."""
    cv2.setNumThreads(0)  # as many threads as the loaders make
    dataset = reader.dataset(folder, decoded=decoded)
    make_cold(folder)
    cpu, begin = tree_cpu_s(), perf_counter()
    loader = reader.loader.make(Job(dataset, BATCH, workers, sample_bytes=24, shuffle_seed=0))
    parts, first_batch_s = [], 0.0
    for batch in loader:
        first_batch_s = first_batch_s or perf_counter() - begin
        parts.append(np.asarray(batch))
    elapsed, spent = perf_counter() - begin, tree_cpu_s() - cpu
    rows = np.concatenate(parts)
    keys = np.sort(rows[:, 0])
    if not np.array_equal(keys, np.arange(len(dataset))) or not np.array_equal(rows[:, 1], expected[rows[:, 0]]):
        raise AssertionError("other samples, or other bytes, were delivered")
    reader.loader.close(loader)
    return Run(len(keys) / elapsed, spent / len(keys) * 1e6, first_batch_s)


def against_best(name: str, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Rate and CPU over those of the fastest peer that has as many runs; {} where there is none, and for peers."""
    mine = runs[name]
    peers = [each for each, found in runs.items() if not each.startswith(OURS) and len(found) == len(mine)]
    if not name.startswith(OURS) or not peers or not mine:
        return {}
    best = max(peers, key=lambda each: report.median([one.samples_per_s for one in runs[each]]))
    row: dict[str, Any] = {"best_peer": best}
    for column, at in (("ratio_to_best", 0), ("cpu_ratio", 1)):
        row |= ratio_columns(column, [one[at] for one in mine], [one[at] for one in runs[best]])
    return row


@report.benchmark("cold_files", 5, batch_size=BATCH)
@report.loader_option
@click.option("--case", type=click.Choice(["decoded", "bytes"]), help="Only this one.")
@report.workers_option
@click.option("--files", type=click.IntRange(min=1), default=3000, show_default=True)
@report.folder_option
def main(
    quick: bool,
    repetitions: int,
    wanted: Sequence[str],
    case: str | None,
    workers: int,
    files: int,
    folder: Path | None,
) -> Iterator[dict[str, Any]]:
    readers = present(READERS, wanted)
    with tempfile.TemporaryDirectory(dir=folder, prefix="cold-files-") as made:
        expected = write(Path(made), 100 if quick else files)
        for name in ("decoded", "bytes") if case is None else (case,):

            def measure(reader: Reader, decoded: bool = name == "decoded") -> Run:
                return isolated(run, Path(made), decoded, reader, workers, expected)

            def figures(one: Run) -> str:
                return f"{one.samples_per_s:.0f} samples/s, {one.cpu_us:.0f} us of CPU for each"

            rows, runs = measured_rows(f"cold files, {name}", readers, repetitions, measure, figures)
            yield from (row | against_best(row["loader"], runs) for row in rows)


if __name__ == "__main__":
    main()
