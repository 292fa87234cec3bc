"""What the figures should be, and whether they are: from the session's rows alone.

``bottleneck`` says what limits training: "preparation" where steps on resident batches are at least 1.5 times as fast
as the best peer delivers (only then can a loader be so much faster at all), else "step".
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.turns import paired

Row = Mapping[str, Any]

HYBRID_OF_SUM = 0.90
FASTER, NOT_SLOWER = 1.5, 1.0
SLOWDOWN = 0.03
ENOUGH = 0.97  # of the rate of steps on resident batches: the CPU lane suffices
DEVICE_BYTES = 1_000_000_000
P99_S, P999_S = 200e-6, 1e-3

_OURS = ("cpu", "device", "hybrid")
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<": operator.lt, "<=": operator.le}


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All of them: ``name``, ``case``, ``measured``, ``relation``, ``target``, ``met``. ``measured`` and ``met`` are
    None where nothing was measured, or where what the target speaks of was not the case; then ``why`` says so."""
    cases = dict.fromkeys(str(row["case"]) for row in rows)
    by_case = {case: {str(row["name"]): row for row in rows if row["case"] == case} for case in cases}
    return [
        _hybrid_of_sum(by_case.get("rates", {})),
        _to_peers("rates", by_case.get("rates", {})),
        _to_peers("training", by_case.get("training", {})),
        _to_peers("light", by_case.get("light", {})),
        _slowdown(by_case.get("light", {})),
        *(
            _target("device_bytes_peak", f"memory, {name}", row.get("device_bytes_peak"), "<", DEVICE_BYTES)
            for name in ("hybrid", "hybrid, budget")
            for row in (by_case.get("memory", {}).get(name, {}),)
        ),
        *(
            _target(name, "thread", by_case.get("thread", {}).get("hybrid", {}).get(name), "<=", limit)
            for name, limit in (
                ("next_p99_s", P99_S),
                ("next_p999_s", P999_S),
                ("pause_p99_s", P99_S),
                ("pause_p999_s", P999_S),
            )
        ),
    ]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    """``measured``, with ``low`` and ``high`` (95 %) where there are several repetitions; of those that both have."""
    both = min(len(ours), len(theirs))
    middle, low, high = paired(ours[:both], theirs[:both])
    several = math.isfinite(high)
    return {"measured": middle, "low": low if several else None, "high": high if several else None}


def _target(name: str, case: str, measured: float | None, relation: str, target: float, **more: Any) -> dict[str, Any]:
    met = None if measured is None else bool(_SIGNS[relation](measured, target))
    row = {"name": name, "case": case, "measured": measured, "relation": relation, "target": target, "met": met}
    return {**row, **({"why": "not measured"} if measured is None else {}), **more}


def _each(row: Row | None) -> list[float]:
    return [] if row is None else list(row.get("samples_per_s_each", []))


def _hybrid_of_sum(rows: Mapping[str, Row]) -> dict[str, Any]:
    """The hybrid's rate to that of both lanes, in which a core counts once: what the device lane takes of the host's
    cores, the CPU lane does not have. Each lane's CPU seconds a sample are those that it has taken by itself."""
    cpu, device, hybrid = (_each(rows.get(name)) for name in _OURS)
    if not (cpu and device and hybrid):
        return _target("hybrid_of_sum", "rates", None, ">=", HYBRID_OF_SUM)
    busy = zip(rows["cpu"]["cores_busy_each"], rows["device"]["cores_busy_each"], strict=False)
    total = [b + a * max(0.0, 1 - beside / own) for a, b, (own, beside) in zip(cpu, device, busy, strict=False)]
    found = ratio(hybrid, total)
    return _target("hybrid_of_sum", "rates", found.pop("measured"), ">=", HYBRID_OF_SUM, **found)


def _to_peers(case: str, rows: Mapping[str, Row]) -> dict[str, Any]:
    hybrid = _each(rows.get("hybrid"))
    peers = {name: _each(row) for name, row in rows.items() if name not in _OURS and _each(row)}
    if not hybrid or not peers:
        return _target("ratio_to_best_peer", case, None, ">=", FASTER if case == "rates" else NOT_SLOWER)
    best = max(peers, key=lambda name: float(np.median(peers[name])))
    bottleneck = _bottleneck(rows["hybrid"], float(np.median(peers[best])))
    target = FASTER if bottleneck == "preparation" else NOT_SLOWER
    found = ratio(hybrid, peers[best])
    absent = [name for name, row in rows.items() if name not in _OURS and not _each(row)]
    more = {"best_peer": best, "bottleneck": bottleneck, "peers_absent": absent}
    return _target("ratio_to_best_peer", case, found.pop("measured"), ">=", target, **found, **more)


def _bottleneck(hybrid: Row, peer: float) -> str:
    """Without a step it is always preparation."""
    most = _resident_rate(hybrid)
    return "step" if most is not None and most < FASTER * peer else "preparation"


def _resident_rate(row: Row) -> float | None:
    """Samples per second of steps on resident batches; None where there was no step."""
    step_s, batch = row.get("resident_step_s"), row.get("batch")
    return None if step_s is None or batch is None else float(batch / step_s)


def _slowdown(rows: Mapping[str, Row]) -> dict[str, Any]:
    name, case = "step_slowdown", "light, CPU lane suffices"
    cpu, hybrid = rows.get("cpu", {}), rows.get("hybrid", {})
    most = _resident_rate(cpu)
    if most is None or "step_slowdown" not in hybrid or "samples_per_s" not in cpu:
        return _target(name, case, None, "<", SLOWDOWN)
    share = cpu["samples_per_s"] / most
    if share < ENOUGH:
        why = f"the CPU lane alone reached {share:.2f} of the rate of resident batches: it did not suffice"
        return _target(name, case, None, "<", SLOWDOWN, why=why, with_hybrid=hybrid["step_slowdown"])
    return _target(name, case, hybrid["step_slowdown"], "<", SLOWDOWN, cpu_alone=cpu.get("step_slowdown"))
