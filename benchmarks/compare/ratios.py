"""This loader against the best of its peers, repetition by repetition; and what the tables of the page make of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from benchmarks import report
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
    """Columns of one of this loader's rows: its rate over that of the best peer in the same order, and its CPU seconds
    of a sample over those of the peer that needs least.

    In order is compared with peers in order; bounded with peers out of order. Peers that failed are left out.
    """
    count = len(runs[loader.name])
    peers = [
        each.name
        for each in loaders
        if not each.name.startswith(OURS) and each.in_order == loader.in_order and len(runs[each.name]) == count
    ]
    if not loader.name.startswith(OURS) or not count or not peers:
        return {}
    rates = {name: [one.samples_per_s for one in runs[name]] for name in (loader.name, *peers)}
    costs = {name: [one.cpu_s_per_sample for one in runs[name]] for name in (loader.name, *peers)}
    best = max(peers, key=lambda name: report.median(rates[name]))
    thrifty = min(peers, key=lambda name: report.median(costs[name]))
    row = {"best_peer": best, **ratio_columns("ratio_to_peer", rates[loader.name], rates[best])}
    row |= {"thriftiest_peer": thrifty, **ratio_columns("cpu_ratio_to_peer", costs[loader.name], costs[thrifty])}
    return row


# --- the table of a comparison: for each case the best of each family, and this loader against the best peer ----------


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
        found[family] = max(_rates_of(row for row in rows if row["loader"].startswith(begins)), default=None)
    for order, loader in SPEEDS:
        row = next((row for row in rows if row["loader"] == loader and "samples_per_s" in row), None)
        found[order] = None if row is None else row["samples_per_s"]
        found[f"{order} ratio"] = None if row is None else ratio(row, "ratio_to_peer")
    return found


def _rates_of(rows: Iterable[Row]) -> list[float]:
    return [row["samples_per_s"] for row in rows if "samples_per_s" in row]


def ratio(row: Row, name: str) -> str | None:
    """ "1.23 (1.10 to 1.38)": a ratio with its 95 % interval."""
    if row.get(name) is None:
        return None
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return f"{row[name]:.2f}" if high is None else f"{row[name]:.2f} ({low:.2f} to {high:.2f})"


# --- the table of scaling: a row for each cell, this loader beside the best of its peers in the same order ------------


_PYTORCH = "pytorch in order"
_SPENT = (
    ("main", "main_us_per_sample", "{:.0f} / {:.0f}"),
    ("workers_us", "workers_us_per_sample", "{:.0f} / {:.0f}"),
    ("first", "first_batch_s", "{:.2f} / {:.2f}"),
    ("next", "next_us_p50", "{:.0f} / {:.0f}"),
)


def scaling_summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each cell, in their order."""
    return [_cell([row for row in rows if row["case"] == case]) for case in dict.fromkeys(row["case"] for row in rows)]


def _cell(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {key: rows[0][key] for key in ("case", "workers", "cost_ms", "spread", "bare_of_bound")}
    by_name = {row["loader"]: row for row in rows if "of_bound" in row}
    for order in ("in order", "bounded"):
        ours = by_name.get(f"{OURS} {order}")
        peers = [
            row
            for name, row in by_name.items()
            if not name.startswith(OURS) and (row["order"] == "in order") == (order == "in order")
        ]
        if peers:
            best = max(peers, key=lambda row: float(row["of_bound"]))
            found[f"peer {order}"] = f"{best['of_bound']:.3f} ({best['loader']})"
        if ours is not None:
            found[order] = ours["of_bound"]
            found[f"{order} ratio"] = ratio(ours, "ratio_to_peer")
    this, pytorch = by_name.get(f"{OURS} in order"), by_name.get(_PYTORCH)
    if this is not None and pytorch is not None:
        for name, key, form in _SPENT:
            if pytorch[key] is not None and this[key] is not None:  # no batch lay ready in time
                found[name] = form.format(pytorch[key], this[key])
    return found
