"""This loader against the best of its peers, repetition by repetition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.peers import Loader
from benchmarks.turns import ratio_columns

OURS = "minato_gpu"


class Measured(Protocol):
    """One run of a loader."""

    @property
    def samples_per_s(self) -> float: ...

    @property
    def cpu_s_per_sample(self) -> float: ...


def against_peers(loader: Loader, loaders: Sequence[Loader], runs: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """Columns of one of this loader's rows: its rate over that of the best peer in the same order, and of PyTorch.

    In order is compared with peers in order; bounded with peers out of order. Peers that failed are left out. Also the
    CPU seconds of a sample over those of the peer that needs least.
    """
    if not loader.name.startswith(OURS):
        return {}
    mine = runs[loader.name]
    peers = [
        each.name
        for each in loaders
        if not each.name.startswith(OURS)
        and (each.order == "in order") == (loader.order == "in order")
        and mine
        and len(runs[each.name]) == len(mine)
    ]
    row: dict[str, Any] = {}
    for name, chosen in (("peer", peers), ("pytorch", [each for each in peers if each.startswith("pytorch")])):
        if chosen:
            best = max(chosen, key=lambda each: float(np.median(_rates(runs[each]))))
            row |= {f"best_{name}": best, **ratio_columns(f"ratio_to_{name}", _rates(mine), _rates(runs[best]))}
    if peers:
        thrifty = min(peers, key=lambda each: float(np.median(_costs(runs[each]))))
        row |= {
            "thriftiest_peer": thrifty,
            **ratio_columns("cpu_ratio_to_peer", _costs(mine), _costs(runs[thrifty])),
        }
    return row


def _rates(runs: Sequence[Measured]) -> list[float]:
    return [one.samples_per_s for one in runs]


def _costs(runs: Sequence[Measured]) -> list[float]:
    return [one.cpu_s_per_sample for one in runs]
