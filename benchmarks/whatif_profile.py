"""A profile for ``benchmarks.whatif``: measured by a few runs of this loader, each in a process of its own.

Warm: all bytes kept in memory. Costs of samples and the rate with two workers, and with another count of them; steps
that take twice as long as preparing, so that what ``next`` takes is the loader's own. Cold: nothing is prepared, so
that an epoch takes what reading does. Apart: nothing is prepared and nothing read, and no epoch begins before the last
one has ended, so that its first batch takes what beginning does. These runs take turns with the settings that are to be
predicted, and those are predicted from nothing else: what happens to the machine meanwhile happens to all of them.
"""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from benchmarks.whatif_run import PREFETCH, WARM, Data, Measured, Stored, Way
from minato_gpu.lab.analysis.profile import Profile, Storage
from minato_gpu.threads import usable_cores

LATENCY_MS = 2.0
_LONG_MS = 30.0
_REQUESTS = 48
_ENDLESS = 1e10  # bytes a second


class Beyond(NamedTuple):
    """What a profile does not tell, in seconds. ``sleep_s``: that a step's sleep takes too long; ``between_s``: that
    an epoch takes to begin, where that waits for the end of the one before."""

    sleep_s: float
    between_s: float


def profile_ways(data: Data, base: Way, costs_s: Sequence[float], *, quick: bool) -> dict[str, Way]:
    """The runs that make a profile. ``costs_s``: of the samples, about."""
    warm = replace(base, cache=WARM, epochs=1 if quick else 4)
    nothing = (1e-6,) * len(costs_s)
    other = 4 * base.workers if base.slept else 1
    return {
        "warm": warm,
        "other": replace(warm, workers=other),
        "stepping": replace(warm, step_s=2 * data.batch * float(np.mean(costs_s)) / base.workers),
        "cold": Way(shards=2, epochs=warm.epochs, slept=nothing),
        "apart": Way(shards=2, cache=WARM, filling=3, epochs=warm.epochs, slept=nothing),
    }


def profile_of(
    data: Data, samples: int, ways: Mapping[str, Way], runs: Mapping[str, Sequence[Measured]], storage: Storage
) -> tuple[Profile, Beyond]:
    """The profile of the setting "warm", of each way the run in the middle: one alone may be disturbed, and all
    predictions with it. ``samples``: of an epoch; costs may be known of fewer, as some were prepared ahead of it."""
    names = "warm", "other", "stepping", "cold", "apart"
    warm, other, stepping, cold, apart = (_middle(runs[name]) for name in names)
    base = ways["warm"]
    reading_s = float(np.median(cold.seconds)) / cold.reads
    scaling = {ways[name].workers: _rate(samples, run) for name, run in (("warm", warm), ("other", other))}
    profile = Profile(
        loader="minato_gpu",
        samples=samples,
        batch_size=data.batch,
        workers=base.workers,
        prefetch=PREFETCH,
        in_order=True,
        max_lateness=0,
        rank=0,
        ranks=1,
        cores=usable_cores(),
        prepare_s=tuple(warm.costs_s),
        prepare_cpu_share=min(1.0, float(np.sum(warm.computed_s) / np.sum(warm.costs_s))),
        collate_s=0.0,
        step_s=(0.0,),
        transfer_s=0.0,
        loader_s=float(np.median(stepping.waits_s)),
        startup_s=warm.start_s,
        storage=replace(storage, cpu_s=reading_s),
        scaling=tuple(sorted(scaling.items())),
        persistent=True,
        overlap=True,
        between_s=_between_s(stepping),
    )
    sleep_s = float(np.median(stepping.steps_s)) - ways["stepping"].step_s
    return profile, Beyond(sleep_s, _between_s(apart))


def _between_s(run: Measured) -> float:
    return max(0.0, float(np.median(run.between_s) - np.median(run.waits_s)))


def _middle(runs: Sequence[Measured]) -> Measured:
    return sorted(runs, key=lambda run: float(np.median(run.seconds)))[(len(runs) - 1) // 2]


def _rate(samples: int, run: Measured) -> float:
    return samples / float(np.median(run.seconds))


def measured_storage(data: Data, address: str) -> Storage:
    """What the server does: the latency of requests, one after the other over one connection. How much it differs is
    measured where it is long, beside what the machine's own work adds: that part does not change the order of answers.
    """
    dataset = Stored(data, address)
    sizes = dataset.sizes()
    paths = [urlsplit(source.path).path for index in range(len(sizes)) for source in dataset.source(index)]
    waits = _first_bytes(address, paths[:_REQUESTS], LATENCY_MS)
    long_waits = np.log(_first_bytes(address, paths[:_REQUESTS], _LONG_MS))
    return Storage(
        bytes_per_s=_ENDLESS,
        latency_s=float(np.median(waits)),
        requests=float(dataset.parts),
        nbytes=float(np.mean(sizes)),
        concurrency=1.0,
        sizes=tuple(sizes),
        spread=float(np.diff(np.quantile(long_waits, [0.16, 0.84]))[0]) / 2,
        remote=True,
        shares=dataset.shares(),
    )


def _first_bytes(address: str, paths: Sequence[str], latency_ms: float) -> list[float]:
    """Seconds until each is there; the server has read them all before."""
    urllib.request.urlopen(f"{address}/set?latency_ms={latency_ms}&rate=None").close()
    at = urlsplit(address)
    connection = http.client.HTTPConnection(str(at.hostname), at.port)
    times = []
    for path in (*paths, *paths):
        begin = perf_counter()
        connection.request("GET", path, headers={"Range": "bytes=0-0"})
        connection.getresponse().read()
        times.append(perf_counter() - begin)
    connection.close()
    return times[len(paths) :]
