"""Counters as flat numbers for TensorBoard, Weights & Biases and others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real

from minato_gpu.samples import JSON, Value

_NO_FIGURES = frozenset({"failures", "longest_waits"})
"""Reports about single samples: their positions are no figures of the run."""


def scalars(stats: Mapping[str, JSON]) -> dict[str, float]:
    """Returns every finite number of ``stats`` under its path, such as ``lanes/cpu/busy_share``.

    True is 1.0. The places of a list (several devices) are parts of the path, from 0. Text, None, NaN and infinity are
    left out.
    """
    return dict(_flat((name, value) for name, value in stats.items() if name not in _NO_FIGURES))


def _flat(items: Iterator[tuple[str, Value]]) -> Iterator[tuple[str, float]]:
    for name, value in items:
        if isinstance(value, Mapping):
            yield from _flat((f"{name}/{key}", inner) for key, inner in value.items())
        elif isinstance(value, (list, tuple)):
            yield from _flat((f"{name}/{place}", inner) for place, inner in enumerate(value))
        elif isinstance(value, Real) and math.isfinite(value):
            yield name, float(value)
