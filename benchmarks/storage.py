"""Slow storage: how much of its latency every loader hides.

Samples are objects behind a server whose latency is chosen (``benchmarks.throttle``: a median, and one request in a
hundred takes ten times as long); preparing one takes a fixed time: its bytes are checked, and what is left of that time
is slept, so that more workers than cores can be had (emulated preparation). The consumer takes batches for a fixed
time. Rate: samples after the first batch by the time since. With w workers no loader can be faster than w samples in
the time that preparing one takes, which is measured:

    of_bound = rate x seconds of preparation / workers

Peers read by a connection that each worker, or each of the threads in a worker, keeps open. ``16 threads``: the data
set's ``__getitems__`` reads the samples of a batch with sixteen threads before it prepares them. In the case
``latency x 10`` the latency changes so in the middle, and three seconds later it is counted.
"""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks import report
from benchmarks.isolate import isolated
from benchmarks.peers import Job, Loader
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.peers.spdl import SpdlPool
from benchmarks.peers.torchdata import TorchdataNodes
from benchmarks.throttle import Throttle, content, server
from benchmarks.turns import measured_rows, present, select
from minato_gpu import Source, read_bytes

NBYTES = 20_000
THREADS = 16
BATCH = 16
_ENDLESS = 1 << 20
_local = threading.local()
_pool: ThreadPoolExecutor | None = None


class Objects:
    """Sample k is k, as object k says it, and the sum of the object's bytes: int64 (2,)."""

    def __init__(self, address: str, prepare_s: float, samples: int = _ENDLESS, nbytes: int = NBYTES) -> None:
        self.address, self.prepare_s, self.samples, self.nbytes = address, prepare_s, samples, nbytes

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, key: int) -> NDArray[np.int64]:
        return self._prepared(key, self._bytes(key))

    def _bytes(self, key: int) -> NDArray[np.uint8]:
        address = urlsplit(self.address)
        connection = getattr(_local, "connection", None)
        if connection is None:
            connection = _local.connection = http.client.HTTPConnection(str(address.hostname), address.port)
        connection.request("GET", f"/{key}.bin")
        return np.frombuffer(connection.getresponse().read(), np.uint8)

    def _prepared(self, key: int, data: NDArray[np.uint8]) -> NDArray[np.int64]:
        begin = time.perf_counter()
        if not np.array_equal(data, content(key, self.nbytes)):
            raise AssertionError(f"object {key} has other bytes")
        sample = np.array([key, data.sum(dtype=np.int64)], np.int64)
        time.sleep(max(0.0, begin + self.prepare_s - time.perf_counter()))
        return sample


class InThreads(Objects):
    """Reads the samples of a batch with sixteen threads."""

    def __getitems__(self, keys: list[int]) -> list[NDArray[np.int64]]:
        global _pool
        _pool = _pool or ThreadPoolExecutor(THREADS)
        return [self._prepared(key, data) for key, data in zip(keys, _pool.map(self._bytes, keys), strict=True)]


class Declared(Objects):
    """Says where the bytes lie."""

    def source(self, key: int) -> Source:
        """The object."""
        return Source(f"{self.address}/{key}.bin", 0, self.nbytes)

    def _bytes(self, key: int) -> NDArray[np.uint8]:
        return read_bytes(self.source(key))


READERS: dict[Loader, type[Objects]] = {
    PyTorch("pytorch"): Objects,
    PyTorch("pytorch, 16 threads a worker", prefetch_factor=4): InThreads,
    SpdlPool("spdl threads", processes=False, concurrency=THREADS): Objects,
    SpdlPool("spdl processes", processes=True, concurrency=4): Objects,
    TorchdataNodes("torchdata threads", processes=False): Objects,
    Minato("minato_gpu in order"): Declared,
    Minato("minato_gpu bounded", in_order=False): Declared,
}
"""Each loader, and the data set that reads for it."""


class Case(NamedTuple):
    """Median latency and preparation in milliseconds; ``times``: by which the latency changes in the middle."""

    latency_ms: float
    prepare_ms: float
    times: float = 1.0

    @property
    def name(self) -> str:
        change = "" if self.times == 1 else f" x {self.times:g}"
        return f"latency {self.latency_ms:g} ms{change}, preparation {self.prepare_ms:g} ms"


CASES = (*(Case(latency, prepare) for latency in (20, 50, 100) for prepare in (3, 20)), Case(20, 3, 10.0))


class Run(NamedTuple):
    """Samples a second, of the bound, and second requests for each sample."""

    samples_per_s: float
    of_bound: float
    hedged_share: float


def run(case: Case, loader: Loader, workers: int, seconds: float) -> Run:
    """One loader on one case, in a process of its own."""
    prepare_s = case.prepare_ms / 1e3
    with server(Throttle(case.latency_ms, 0.01), NBYTES) as address:
        made: Any = loader.make(Job(READERS[loader](address, prepare_s), BATCH, workers, sample_bytes=16))
        rate = _rate(made, case, address, seconds)
        reads = made.stats()["reads"] if isinstance(loader, Minato) else {"hedges": 0, "reads": 1}
        share = reads["hedges"] / max(1, reads["reads"])
    return Run(rate, rate * slept_s(prepare_s) / workers, share)


def _rate(loader: Any, case: Case, address: str, seconds: float) -> float:
    """Samples a second, once the first batch is there; where the latency changes, three seconds after that."""
    batches, changed = iter(loader), case.times == 1
    keys = _keys(next(batches))
    begin = time.perf_counter()
    counted_from, counted = begin, 0
    for batch in batches:
        now, new = time.perf_counter(), _keys(batch)
        if keys & new:
            raise AssertionError(f"delivered twice: {keys & new}")
        keys |= new
        counted += len(new)
        if not changed and now > begin + seconds / 2:
            urllib.request.urlopen(f"{address}/set?latency_ms={case.latency_ms * case.times}").close()
            changed, counted_from = True, now + 3.0
        if now <= counted_from:
            counted = 0
        elif now > max(begin, counted_from) + seconds:
            return counted / (now - counted_from)
    raise AssertionError("the data set has ended")


def _keys(batch: Any) -> set[int]:
    return {int(row[0]) for row in np.asarray(batch)}


def slept_s(seconds: float) -> float:
    """How long a sleep of so many seconds takes here."""
    begin = time.perf_counter()
    for _ in range(20):
        time.sleep(seconds)
    return (time.perf_counter() - begin) / 20


@report.benchmark("storage", 3, batch_size=BATCH, object_bytes=NBYTES, preparation="emulated: slept")
@report.loader_option
@report.case_option
@report.workers_option
@click.option("--seconds", type=click.FloatRange(min=0.1), default=6.0, show_default=True, help="For each run.")
def main(
    quick: bool, repetitions: int, wanted: Sequence[str], names: Sequence[str], workers: int, seconds: float
) -> Iterator[dict[str, Any]]:
    cases, loaders = select("case", CASES, names), present([*READERS], wanted)
    if quick:
        cases, seconds = [cases[0]._replace(latency_ms=5)], 0.5
    for case in cases:

        def measure(loader: Loader, case: Case = case) -> Run:
            return isolated(run, case, loader, workers, seconds, timeout_s=120 + 10 * seconds)

        yield from measured_rows(case.name, loaders, repetitions, measure)[0]


if __name__ == "__main__":
    main()
