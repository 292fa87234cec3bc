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
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import click
import numpy as np
import psutil

from benchmarks import report
from benchmarks.isolate import isolated, tree_cpu_s
from benchmarks.turns import cases_called, measured_rows, ratio_columns
from benchmarks.work import Slept
from minato_gpu import DataLoader, Lanes
from minato_gpu.lanes.far.agent import serve
from minato_gpu.sources.cluster_token import TOKEN

BATCH, SLEEP_S = 16, 10e-3
_MANY = 1 << 20  # samples: no run comes to the end
_FORK = multiprocessing.get_context("fork")


class Way(NamedTuple):
    """So many workers here and at an agent."""

    name: str
    local: int
    far: int


class Case(NamedTuple):
    """``words`` of 8 bytes a sample. ``harm``: the signal that the agent gets, if any."""

    name: str
    words: int
    ways: tuple[Way, ...]
    harm: int = 0


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
)


class Run(NamedTuple):
    """See the head of this module."""

    samples_per_s: float
    of_bound: float
    main_us: float
    cpu_us: float
    recovery_s: float


@contextlib.contextmanager
def _agent(cores: int) -> Iterator[tuple[str, Any]]:
    """An agent's address, and its process."""
    os.environ.setdefault(TOKEN, secrets.token_hex(16))
    here, there = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=serve, args=("127.0.0.1", 0, cores, there.send))
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
            cluster = Lanes(address)
        samples: Any = Slept(np.full(_MANY, SLEEP_S), case.words)
        loader: Any = DataLoader(samples, BATCH, num_workers=way.local, cluster=cluster)
        begin = clock = main_s = tree_s = longest = 0.0
        counted, asked = 0, time.perf_counter()
        for batch in loader:
            now = time.perf_counter()
            begin = begin or now
            if clock:
                counted += len(batch)
                longest = max(longest, now - asked)
            elif now > begin + seconds / 2:
                clock, main_s, tree_s = now, time.process_time(), tree_cpu_s()
                if case.harm and process is not None:
                    for each in (process, *psutil.Process(process.pid).children(recursive=True)):
                        os.kill(each.pid, case.harm)
            if now > begin + seconds:
                break
            asked = time.perf_counter()
        rate = counted / (now - clock)
        main_us, cpu_us = ((1e6 * spent / counted) for spent in (time.process_time() - main_s, tree_cpu_s() - tree_s))
        cpu_us = 0.0 if case.harm else cpu_us
        return Run(rate, rate * SLEEP_S / (way.local + way.far), main_us, cpu_us, longest)


@report.benchmark("cluster", 5, batch_size=BATCH, sleep_s=SLEEP_S)
@report.case_option
@click.option("--seconds", type=click.FloatRange(min=0.1), default=6.0, show_default=True, help="For each run.")
def main(quick: bool, repetitions: int, names: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    seconds = 1.0 if quick else seconds
    for case in cases_called(CASES, names):

        def measure(way: Way, case: Case = case) -> Run:
            return isolated(run, case, way, seconds, timeout_s=60 + 3 * seconds)

        rows, runs = measured_rows(case.name, case.ways, repetitions, measure, lambda one: f"{one.samples_per_s:.0f}/s")
        first, *_ = ([one.samples_per_s for one in some] for some in runs.values())
        for row, way, some in zip(rows, case.ways, runs.values(), strict=True):
            rates = [one.samples_per_s for one in some]
            compared = len(case.ways) > 1 and first and len(rates) == len(first)
            yield row | {"nodes": int(way.far > 0)} | (ratio_columns("ratio", rates, first) if compared else {})


if __name__ == "__main__":
    main()
