"""What the figures should be, and whether they are: from the session's rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.turns import ratio_columns

Row = Mapping[str, Any]

HYBRID_OF_SUM = 0.90
FASTER, NOT_SLOWER = 1.5, 1.0
DEVICE_BYTES = 1_000_000_000

_OURS = ("cpu", "device", "hybrid")


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All of them: ``name``, ``case``, ``measured``, ``relation``, ``target``, ``met``; of ratios of several
    repetitions also ``measured_low`` and ``measured_high`` (95 %). None where nothing was measured."""
    cases: dict[str, dict[str, Row]] = {"rates": {}, "training": {}, "memory": {}}
    for row in rows:
        cases.setdefault(row["case"], {})[row["name"]] = row
    found = [_hybrid_of_sum(cases["rates"]), *(_to_peers(case, cases[case]) for case in ("rates", "training"))]
    for name in ("hybrid", "hybrid, budget"):
        peak = cases["memory"].get(name, {}).get("device_bytes_peak")
        row = {"name": "device_bytes_peak", "case": f"memory, {name}", "measured": peak}
        found.append(
            {**row, "relation": "<", "target": DEVICE_BYTES, "met": None if peak is None else peak < DEVICE_BYTES}
        )
    return found


def _ratio(name: str, case: str, target: float, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    both = min(len(ours), len(theirs))
    found = ratio_columns("measured", ours[:both], theirs[:both]) if both else {"measured": None}
    met = None if found["measured"] is None else found["measured"] >= target
    return {"name": name, "case": case, **found, "relation": ">=", "target": target, "met": met}


def _each(rows: Mapping[str, Row], name: str) -> list[float]:
    return list(rows.get(name, {}).get("samples_per_s_each", []))


def _hybrid_of_sum(rows: Mapping[str, Row]) -> dict[str, Any]:
    """The hybrid's rate to that of both lanes, in which a core counts once: what the device lane takes of the host's
    cores, the CPU lane does not have. Each lane's CPU seconds a sample are those that it has taken by itself."""
    cpu, device, hybrid = (_each(rows, name) for name in _OURS)
    busy = [list(rows.get(name, {}).get("cores_busy_each", [])) for name in ("cpu", "device")]
    lanes = zip(cpu, device, *busy, strict=False)
    total = [b + a * max(0.0, 1 - beside / own) for a, b, own, beside in lanes]
    return _ratio("hybrid_of_sum", "rates", HYBRID_OF_SUM, hybrid, total)


def _to_peers(case: str, rows: Mapping[str, Row]) -> dict[str, Any]:
    """The hybrid's rate to the best peer's. Only where steps on resident batches are at least 1.5 times as fast as that
    delivers can a loader be so much faster; else the step is the ``bottleneck``. Without steps preparation is."""
    peers = {name: each for name in rows if name not in _OURS and (each := _each(rows, name))}
    if not peers:
        return _ratio("ratio_to_best_peer", case, FASTER if case == "rates" else NOT_SLOWER, (), ())
    best = max(peers, key=lambda name: float(np.median(peers[name])))
    hybrid = rows.get("hybrid", {})
    step_s = hybrid.get("resident_step_s")
    steps_bind = step_s is not None and hybrid["batch"] / step_s < FASTER * float(np.median(peers[best]))
    target, bottleneck = (NOT_SLOWER, "step") if steps_bind else (FASTER, "preparation")
    found = _ratio("ratio_to_best_peer", case, target, _each(rows, "hybrid"), peers[best])
    return {**found, "best_peer": best, "bottleneck": bottleneck}
