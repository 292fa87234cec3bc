"""This loader against the best of its peers, repetition by repetition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.peers import Loader
from minato_gpu.extras import from_extra

with from_extra("bench"):
    import scipy

OURS = "minato_gpu"


class Measured(Protocol):
    """One run of a loader."""

    @property
    def samples_per_s(self) -> float: ...

    @property
    def cpu_s_per_sample(self) -> float: ...


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The ratio ours / theirs and its 95 % interval: Student's t on the logarithms of the repetitions' ratios.

    The interval is infinite where there is one repetition only. Raises ValueError where the numbers do not match.
    """
    logs = np.log(np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64))
    if logs.ndim != 1 or len(ours) != len(theirs) or not len(logs):
        raise ValueError(f"{len(ours)} and {len(theirs)} repetitions cannot be paired")
    middle = float(logs.mean())
    if len(logs) == 1:
        return float(np.exp(middle)), 0.0, float("inf")
    half = float(scipy.stats.t.ppf(0.975, len(logs) - 1) * scipy.stats.sem(logs))
    return float(np.exp(middle)), float(np.exp(middle - half)), float(np.exp(middle + half))


def against_peers(loader: Loader, loaders: Sequence[Loader], runs: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """Columns of one of this loader's rows: its rate over that of the best peer in the same order, and of PyTorch.

    In order is compared with peers in order; bounded with peers out of order. Peers that failed are left out. Also the
    CPU seconds of a sample over those of the peer that needs least.
    """
    if not loader.name.startswith(OURS):
        return {}
    mine = runs[loader.name]
    peers = [
        each
        for each in loaders
        if not each.name.startswith(OURS)
        and (each.order == "in order") == (loader.order == "in order")
        and mine
        and len(runs[each.name]) == len(mine)
    ]
    row: dict[str, Any] = {}
    for name, chosen in (("peer", peers), ("pytorch", [each for each in peers if each.name.startswith("pytorch")])):
        if chosen:
            best = max(chosen, key=lambda each: float(np.median([one.samples_per_s for one in runs[each.name]])))
            found = paired([one.samples_per_s for one in mine], [one.samples_per_s for one in runs[best.name]])
            row |= {f"best_{name}": best.name, **_columns(f"ratio_to_{name}", found)}
    if peers:
        thrifty = min(peers, key=lambda each: float(np.median([one.cpu_s_per_sample for one in runs[each.name]])))
        costs = [one.cpu_s_per_sample for one in mine], [one.cpu_s_per_sample for one in runs[thrifty.name]]
        row |= {"thriftiest_peer": thrifty.name, **_columns("cpu_ratio_to_peer", paired(*costs))}
    return row


def _columns(name: str, found: tuple[float, float, float]) -> dict[str, float | None]:
    ratio, low, high = found
    return {name: ratio, f"{name}_low": low, f"{name}_high": high if np.isfinite(high) else None}
