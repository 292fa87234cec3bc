"""The scaling benchmark in a table: a row for each cell, this loader beside the best of its peers in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare.ratios import OURS
from benchmarks.compare.summary import ratio

Row = Mapping[str, Any]

COLUMNS: Sequence[tuple[str, str, str]] = (
    ("case", "workers x mean cost, spread", "{}"),
    ("bare_of_bound", "bare processes", "{:.2f}"),
    ("peer in order", "best peer in order", "{}"),
    ("in order", "this", "{:.3f}"),
    ("in order ratio", "ratio (95 %)", "{}"),
    ("peer bounded", "best peer out of order", "{}"),
    ("bounded", "this, bounded", "{:.3f}"),
    ("bounded ratio", "ratio (95 %)", "{}"),
    ("main", "training process, us: PyTorch / this", "{}"),
    ("workers_us", "workers, us: PyTorch / this", "{}"),
    ("first", "first batch, s: PyTorch / this", "{}"),
    ("next", "next() p50, us: PyTorch / this", "{}"),
)
"""Keys of a row of ``summary``, titles and formats; the figures in order, where both orders have one."""

_PYTORCH = "pytorch in order"
_SPENT = (
    ("main", "main_us_per_sample", "{:.0f} / {:.0f}"),
    ("workers_us", "workers_us_per_sample", "{:.0f} / {:.0f}"),
    ("first", "first_batch_s", "{:.2f} / {:.2f}"),
    ("next", "next_us_p50", "{:.0f} / {:.0f}"),
)


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
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
