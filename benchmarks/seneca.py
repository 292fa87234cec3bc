"""A cache that is split between encoded and decoded samples, on the machines and data sets of Seneca (FAST 2026).

Two models choose the shares. Seneca's takes for the rate of an epoch the mean of the rates of samples by where they
lie, and tries all splits in steps of 1 %. (Here without the bandwidths of its cache and network, which were not at
hand, and without augmented samples, which would repeat random draws.) This loader's (``minato_gpu.caching.split``) adds
times: an epoch takes as long as all reads, or as all preparation. Then epochs of both are prepared under a virtual
clock, with the scheduler of production; one takes as long as that, or as its reads.

    paper_split        what the paper chose: per cent encoded, decoded and augmented, of the cache's bytes
    mean_split         encoded and decoded, by the mean of rates; ``time_split``: by this loader's model
    paper_s ...        seconds of the simulated epoch with each; what the paper keeps augmented counts as decoded
    of_mean            ``time_s`` by ``mean_s``

The paper's cache sizes were not at hand: each cache is assumed to hold 400 GB. A sample has 114 KB in all data sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks import report
from minato_gpu.caching.split import Means, Shares, split
from minato_gpu.lab.analysis.predict import TRIP_S
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Work
from minato_gpu.scheduling.policy import Policy

CACHE_BYTES = 400e9
_ENCODED, _LARGER = 114_000, 5.12  # bytes of a sample; times that, decoded
_BATCH, _WORKERS, _AHEAD = 64, 16, 4
_SAMPLES, _QUICK = 12_800, 640  # that are simulated
_SETS = {"ImageNet-1k": 146e9, "OpenImages": 645e9, "ImageNet-22k": 1.3e12}  # bytes


class Machine(NamedTuple):
    """Samples a second of all servers together; ``storage``: bytes a second."""

    name: str
    gpu: float
    prepare: float  # decode and augment
    augment: float
    storage: float
    paper: tuple[str, str]  # splits for ImageNet-1k and OpenImages; for ImageNet-22k it is 100-0-0 everywhere


MACHINES = (
    Machine("in-house", 4550, 2132, 4050, 500e6, ("58-42-0", "62-37-1")),
    Machine("in-house, 2 servers", 9100, 4264, 8100, 500e6, ("40-59-1", "58-41-1")),
    Machine("AWS", 9989, 3432, 6520, 256e6, ("0-81-19", "52-48-0")),
    Machine("Azure", 14301, 9783, 12930, 250e6, ("0-48-52", "5-95-0")),
    Machine("Azure, 2 servers", 28602, 19566, 25860, 250e6, ("0-53-47", "6-93-1")),
)


def mean_of_rates(machine: Machine, budget: float) -> Shares:
    """The split that has the highest mean of rates; ``budget``: bytes of the cache for each sample of the set."""
    read = min(machine.storage / _ENCODED, machine.prepare, machine.gpu)
    encoded, decoded = min(machine.prepare, machine.gpu), min(machine.augment, machine.gpu)

    def rate(shares: Shares) -> float:
        return shares.raw * encoded + shares.fields * decoded + (1 - shares.raw - shares.fields) * read

    return max((_shares(percent / 100, budget) for percent in range(101)), key=rate)


def _shares(decoded: float, budget: float) -> Shares:
    """Of all samples, where this part of the cache's bytes is for decoded ones."""
    fields = min(1.0, decoded * budget / (_ENCODED * _LARGER))
    return Shares(fields, min(1 - fields, (1 - decoded) * budget / _ENCODED))


def added_times(machine: Machine, budget: float) -> Shares:
    """The split of this loader's model."""
    prepare_s = 1 / machine.prepare
    saved_s = prepare_s - 1 / machine.augment
    return split(Means(_ENCODED / machine.storage, prepare_s, saved_s, _ENCODED, _ENCODED * _LARGER), budget)


def epoch_s(machine: Machine, shares: Shares, samples: int) -> float:
    """Seconds of an epoch of so many samples: simulated, or of its reads where these take longer."""
    decoded = np.random.default_rng(0).permutation(samples)[: round(shares.fields * samples)]
    prepare_s = np.full(samples, _WORKERS / machine.prepare)
    prepare_s[decoded] = _WORKERS / machine.augment
    work = Work(prepare_s, prepare_s, _BATCH, (samples,), _WORKERS)
    policy = Policy(_AHEAD * _WORKERS * _BATCH, fixed=True, max_lateness=0)
    prepared = VirtualLoader(work, policy, _BATCH / machine.gpu, trip_s=TRIP_S).run().makespan_s
    return max(prepared, (1 - shares.fields - shares.raw) * samples * _ENCODED / machine.storage)


@report.benchmark("seneca", 1)
def main(quick: bool, repetitions: int) -> Iterator[dict[str, Any]]:
    del repetitions  # nothing is random
    simulated = _QUICK if quick else _SAMPLES
    for machine in MACHINES:
        for (name, nbytes), paper in zip(_SETS.items(), (*machine.paper, "100-0-0"), strict=True):
            report.progress(f"{machine.name}, {name}")
            samples = nbytes / _ENCODED
            budget = CACHE_BYTES / samples
            splits = {
                "paper": _shares(1 - int(paper.split("-")[0]) / 100, budget),
                "mean": mean_of_rates(machine, budget),
                "time": added_times(machine, budget),
            }
            seconds = {each: epoch_s(machine, each, simulated) * samples / simulated for each in {*splits.values()}}
            row: dict[str, Any] = {"machine": machine.name, "set": name, "paper_split": paper}
            row |= {f"{by}_split": _said(splits[by], budget) for by in ("mean", "time")}
            row |= {f"{by}_s": seconds[shares] for by, shares in splits.items()}
            yield row | {"of_mean": row["time_s"] / row["mean_s"]}


def _said(shares: Shares, budget: float) -> str:
    """The shares of the cache's bytes, in per cent."""
    encoded, decoded = (shares.raw * _ENCODED / budget, shares.fields * _ENCODED * _LARGER / budget)
    return f"{100 * encoded:.0f}-{100 * decoded:.0f}"


if __name__ == "__main__":
    main()
