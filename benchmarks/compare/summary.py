"""A comparison in a few columns: for each case the best of each family, and this loader against the best peer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

FAMILIES = {"PyTorch": ("pytorch",), "torchdata": ("torchdata",), "SPDL": ("spdl",), "DALI": ("dali",)}
"""The peers' names in the README, and how their loaders' names begin."""

SPEEDS = (("in order", "minato_gpu in order"), ("bounded", "minato_gpu bounded"))


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each case, in their order: samples/s by family, those of this loader's two orders, and their ratios."""
    return [_case([row for row in rows if row["case"] == case]) for case in dict.fromkeys(row["case"] for row in rows)]


def _case(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {key: rows[0][key] for key in ("workload", "workers", "step_ms")}
    for family, begins in FAMILIES.items():
        found[family] = max(_rates(row for row in rows if row["loader"].startswith(begins)), default=None)
    for order, loader in SPEEDS:
        row = next((row for row in rows if row["loader"] == loader and "samples_per_s" in row), None)
        found[order] = None if row is None else row["samples_per_s"]
        found[f"{order} ratio"] = None if row is None else ratio(row, "ratio_to_peer")
    return found


def _rates(rows: Iterable[Row]) -> list[float]:
    return [row["samples_per_s"] for row in rows if "samples_per_s" in row]


def ratio(row: Row, name: str) -> str | None:
    """ "1.23 (1.10 to 1.38)": a ratio with its 95 % interval."""
    if row.get(name) is None:
        return None
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return f"{row[name]:.2f}" if high is None else f"{row[name]:.2f} ({low:.2f} to {high:.2f})"
