"""Workers of other machines: what they bring beside one of this machine, and what their loss costs.

Samples sleep for 10 ms, so that cores are emulated, and are 12 KB or 600 KB large; batches of 16, in order. One worker
of this machine and 3 or 7 of an agent take turns with as many of this machine alone. The agent is a process of this
machine, so both ends of every connection share its cores.

    samples_per_s   in the second half of so many seconds from the first batch on
    of_bound        that by the rate of as many sleepers that do nothing else
    main_us         CPU microseconds of the training process for each sample
    cpu_us          the same of all processes (0 where the agent is killed, whose time nobody tells then)
    ratio           the rate by that of the same number of local workers, pair by pair, with its 95 % interval
    recovery_s      longest wait for a batch after the agent was killed or stopped (SIGKILL, SIGSTOP)
    peak_unread_bytes   most bytes of samples that were prepared or being prepared, and not delivered

Ray Data (``ray.data``, where Ray is installed) has as many workers for the same 2,000 samples: a mapped range, by
``iter_torch_batches``. Figures are of each one's second epoch, for which workers are there; rates are of the whole
epoch, from asking for its first batch, which takes ``first_s``: behind that of Ray Data many others are ready.

Of workers that are far away, answers and samples take 20 ms each way (proxy.py); of slow ones a sample takes twice as
long, which counts in the bound. A consumer that stops does so for 5 s, with a budget of 32 MB.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import click
import numpy as np
import psutil
from torch.utils.data import get_worker_info

from benchmarks import report
from benchmarks.isolate import FORK, isolated, tree_cpu_s
from benchmarks.proxy import Proxy
from benchmarks.turns import measured_rows, ratio_columns, select
from benchmarks.work import Slept
from minato_gpu import DataLoader, Lanes
from minato_gpu.lanes.far.agent import serve
from minato_gpu.sources.cluster_token import TOKEN

BATCH, SLEEP_S = 16, 10e-3
_MANY = 1 << 20  # samples: no run comes to the end
_EPOCH = 2000  # samples of a run that does
_BUDGET = 32 << 20


class Way(NamedTuple):
    """So many workers here and at an agent, or Ray's."""

    name: str
    local: int
    far: int


class Case(NamedTuple):
    """``words`` of 8 bytes a sample. ``harm``: the signal that the agent gets, if any. ``slower``: so many times as
    long takes a sample there. ``delay_s``: of the connection, each way. ``stops_s``: the consumer stops once."""

    name: str
    words: int
    ways: tuple[Way, ...]
    harm: int = 0
    slower: float = 1.0
    delay_s: float = 0.0
    stops_s: float = 0.0
    of_ray: bool = False  # its first way is Ray Data's, and an epoch is run


def _pair(workers: int) -> tuple[Way, ...]:
    return Way(f"{workers} local", workers, 0), Way(f"1 local, {workers - 1} far", 1, workers - 1)


CASES = (
    *(
        Case(f"{name}, {n} workers", words, _pair(n))
        for name, words in (("12 KB", 1536), ("600 KB", 76_800))
        for n in (4, 8)
    ),
    Case("agent killed", 1536, _pair(4)[1:], signal.SIGKILL),
    Case("agent stopped", 1536, _pair(4)[1:], signal.SIGSTOP),
    Case("40 ms away", 1536, _pair(4)[1:], delay_s=20e-3),
    Case("twice as slow", 1536, _pair(4)[1:], slower=2.0),
    Case("consumer stops", 76_800, _pair(4)[1:], stops_s=5.0),
    Case("Ray Data, 12 KB", 1536, (Way("Ray Data", 0, 4), _pair(4)[1]), of_ray=True),
)


class Run(NamedTuple):
    """See the head of this module."""

    samples_per_s: float
    of_bound: float
    main_us: float
    cpu_us: float
    recovery_s: float
    peak_unread_bytes: int


class _Far(Slept):
    """Samples that take longer where a worker is one of ``far``."""

    far, slower = 0, 1.0

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        if info.num_workers == self.far:
            time.sleep((self.slower - 1.0) * SLEEP_S)
        return super().__getitem__(index)


@contextlib.contextmanager
def _agent(cores: int) -> Iterator[tuple[str, Any]]:
    """An agent's address, and its process."""
    os.environ.setdefault(TOKEN, secrets.token_hex(16))
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=serve, args=("127.0.0.1", 0, cores, there.send))
    process.start()
    try:
        yield here.recv(), process
    finally:
        process.kill()
        process.join()


def run(case: Case, way: Way, seconds: float) -> Run:
    """One loader, in a process of its own."""
    with contextlib.ExitStack() as undo:
        cluster, process = None, None
        if way.far:
            address, process = undo.enter_context(_agent(way.far))
            if case.delay_s:
                proxy = Proxy(address, case.delay_s)
                undo.callback(proxy.cut)
                address = proxy.address
            cluster = Lanes(address)
        samples: Any = _Far(np.full(_MANY, SLEEP_S), case.words)
        samples.far, samples.slower = way.far, case.slower
        budget = _BUDGET if case.stops_s else None
        loader: Any = DataLoader(samples, BATCH, num_workers=way.local, cluster=cluster, host_memory_budget=budget)
        begin = clock = main_s = tree_s = longest = 0.0
        counted, asked = 0, time.perf_counter()
        for batch in loader:
            now = time.perf_counter()
            begin = begin or now
            if clock:
                counted += len(batch)
                longest = max(longest, now - asked)
            elif now > begin + seconds / 2:
                time.sleep(case.stops_s)
                begin += case.stops_s
                clock, main_s, tree_s = time.perf_counter(), time.process_time(), tree_cpu_s()
                if case.harm and process is not None:
                    for each in (process, *psutil.Process(process.pid).children(recursive=True)):
                        os.kill(each.pid, case.harm)
            if now > begin + seconds:
                break
            asked = time.perf_counter()
        rate, bound = counted / (now - clock), (way.local + way.far / case.slower) / SLEEP_S
        main_us, cpu_us = ((1e6 * spent / counted) for spent in (time.process_time() - main_s, tree_cpu_s() - tree_s))
        cpu_us = 0.0 if case.harm else cpu_us
        return Run(rate, rate / bound, main_us, cpu_us, longest, loader.stats()["bytes_in_flight_peak"])


class Epoch(NamedTuple):
    """See the head of this module."""

    samples_per_s: float
    of_bound: float
    main_us: float
    cpu_us: float
    first_s: float


def _of_ray(samples: Slept, workers: int, undo: contextlib.ExitStack) -> Callable[[], Iterable[Any]]:
    """What begins an epoch of Ray Data."""
    import ray.data

    ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
    undo.callback(ray.shutdown)
    ray.data.DataContext.get_current().enable_progress_bars = False

    rows = ray.data.range(_EPOCH).map(lambda row: {"sample": samples[row["id"]]}, concurrency=workers)
    return lambda: (batch["sample"] for batch in rows.iter_torch_batches(batch_size=BATCH))


def epoch(case: Case, way: Way, _: float) -> Epoch:
    """The second epoch of one loader, in a process of its own."""
    with contextlib.ExitStack() as undo:
        samples: Any = Slept(np.full(_EPOCH, SLEEP_S), case.words)
        if way.local:
            cluster = Lanes(undo.enter_context(_agent(way.far))[0])
            loader: Any = DataLoader(samples, BATCH, num_workers=way.local, cluster=cluster, persistent_workers=True)
            begin: Callable[[], Iterable[Any]] = loader.__iter__
        else:
            begin = _of_ray(samples, way.far, undo)
        assert sum(map(len, begin())) == _EPOCH
        main_s, tree_s, asked = time.process_time(), tree_cpu_s(), time.perf_counter()
        counted, first = 0, 0.0
        for batch in begin():
            first = first or time.perf_counter()
            counted += len(batch)
        rate = counted / (time.perf_counter() - asked)
        main_us, cpu_us = ((1e6 * spent / counted) for spent in (time.process_time() - main_s, tree_cpu_s() - tree_s))
        return Epoch(rate, rate / ((way.local + way.far) / SLEEP_S), main_us, cpu_us, first - asked)


@report.benchmark("cluster", 5, batch_size=BATCH, sleep_s=SLEEP_S)
@report.case_option
@click.option("--seconds", type=click.FloatRange(min=0.1), default=6.0, show_default=True, help="For each run.")
def main(quick: bool, repetitions: int, names: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    seconds = 1.0 if quick else seconds
    for case in select("case", CASES, names):
        if case.of_ray and find_spec("ray") is None:
            report.progress(f"{case.name}: left out, since Ray is not installed")
            report.note_absent(["ray"])
            continue

        def measure(way: Way, case: Case = case) -> Run | Epoch:
            kind: Callable[[Case, Way, float], Run | Epoch] = epoch if case.of_ray else run
            return isolated(kind, case, way, seconds, timeout_s=120 + 3 * seconds)

        rows, runs = measured_rows(case.name, case.ways, repetitions, measure)
        first, *_ = ([one.samples_per_s for one in some] for some in runs.values())
        for row, way, some in zip(rows, case.ways, runs.values(), strict=True):
            rates = [one.samples_per_s for one in some]
            compared = len(case.ways) > 1 and first and len(rates) == len(first)
            yield row | {"nodes": int(way.far > 0)} | (ratio_columns("ratio", rates, first) if compared else {})


if __name__ == "__main__":
    main()
