"""Jobs on one host that read the same objects, each for itself or by one reader process (``share``).

Objects lie behind a server that takes 20 ms for each and counts what it sends (``benchmarks.throttle``). Four jobs
train at once, in the same order or in orders of their own, where a cache holds the set. ``times_read``: bytes that the
server has sent, as a multiple of the set's. ``recovery_s``: the longest that another job waited for a batch, while one
was killed or stopped for three seconds, or the reader process was killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import torch

from benchmarks.isolate import isolated, together
from benchmarks.storage import NBYTES, Declared
from benchmarks.throttle import Throttle, served, server
from benchmarks.turns import Row, measured_rows
from minato_gpu import DataLoader

JOBS, BATCH, LATENCY_MS = 4, 16, 20.0
_STEP_S = 10e-3
_STOPPED_S = 3.0


class Jobs(NamedTuple):
    """Loaders that run at once. ``seeds``: how many orders they have; ``fault``: what happens to the first of them, or
    to the reader process."""

    name: str
    arguments: dict[str, Any]
    clients: int = JOBS
    seeds: int = 1
    step_s: float = 0.0
    fault: str = ""


class Found(NamedTuple):
    """What came of a run. ``samples_per_s``: of the slowest job; ``recovery_s``: the longest wait for a batch."""

    samples_per_s: float
    times_read: float
    recovery_s: float


SHARED = {"share": "benchmark"}
CASES: dict[str, tuple[Jobs, ...]] = {
    "share_alone": (Jobs("minato", {}, 1), Jobs("minato, share", SHARED, 1)),
    "share_same_order": (Jobs("minato", {}), Jobs("minato, share", SHARED)),
    "share_other_orders": (
        Jobs("minato", {"cache": "1GB"}, seeds=JOBS),
        Jobs("minato, share", SHARED | {"cache": "1GB"}, seeds=JOBS),
    ),
    **{
        f"share_{fault.replace(' ', '_')}": (Jobs("minato, share", SHARED, step_s=_STEP_S, fault=fault),)
        for fault in ("job killed", "job stopped", "reader killed")
    },
}

EIGHT: dict[str, tuple[Jobs, ...]] = {"eight jobs": (Jobs("minato", {}, 8), Jobs("minato, share", SHARED, 8))}


def run(jobs: Jobs, samples: int, latency_ms: float) -> Found:
    """Run them to the end of an epoch."""
    with server(Throttle(latency_ms), NBYTES) as address:
        results = together(jobs.clients, _train, jobs, address, samples, dead=jobs.fault == "job killed")
        times_read = served(address) / samples / NBYTES
    others = [result for result in results if result[0] or not jobs.fault.startswith("job")]
    return Found(min(rate for _, rate, _ in others), times_read, max(wait for *_, wait in others))


def _train(at: int, barrier: Barrier, jobs: Jobs, address: str, samples: int) -> tuple[int, float, float]:
    data: Any = Declared(address, 0.0, samples)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(at % jobs.seeds)
    loader: Any = DataLoader(data, BATCH, shuffle=True, num_workers=1, generator=generator, **jobs.arguments)
    suffers_at = len(loader) * (5 if jobs.fault == "reader killed" else 3) // 10  # alone, workers read for long
    barrier.wait()
    batches, keys, waits = iter(loader), [], []
    begin = before = time.perf_counter()
    for number, batch in enumerate(batches):
        now = time.perf_counter()
        waits.append(now - before)
        keys.append(batch[:, 0])
        time.sleep(jobs.step_s)
        if at == 0 and number == suffers_at:
            _suffer(jobs.fault, loader)
        before = time.perf_counter()
    elapsed = time.perf_counter() - begin
    if torch.cat(keys).sort().values.tolist() != list(range(len(data))):
        raise AssertionError("samples are lost or doubled")
    return at, len(data) / elapsed, max(waits[1:])


def _suffer(fault: str, loader: Any) -> None:
    if fault == "job killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "reader killed":
        os.kill(loader._session.readers._reader.pid, signal.SIGKILL)
    if fault == "job stopped":
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(_STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)
        os.wait()


def shared(
    *, quick: bool, repetitions: int, cases: Mapping[str, Sequence[Jobs]] = CASES, samples: int = 2400
) -> Iterator[Row]:
    """A row for each case and loader."""
    samples, latency_ms = (64, 2.0) if quick else (samples, LATENCY_MS)
    for case, loaders in cases.items():

        def measure(jobs: Jobs) -> Found:
            return isolated(run, jobs, samples, latency_ms, timeout_s=600)

        for row, jobs in zip(measured_rows(case, loaders, repetitions, measure)[0], loaders, strict=True):
            yield row | {"clients": jobs.clients}
