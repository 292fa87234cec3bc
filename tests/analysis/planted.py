"""Profiles with a known cause of what holds them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minato_gpu.analysis.profile import Phase, Profile

BATCHES = 40
BATCH = 32


def phase(batch_s: float, wait_s: float = 0.0, spread: float = 0.01) -> Phase:
    """Batches that take so long, alternately a little more and less."""
    each = tuple(batch_s * (1 + spread * (-1) ** number) for number in range(BATCHES))
    return Phase(BATCHES, sum(each), wait_s * BATCHES, each)


def profile(
    step_s: float = 0.1,
    warm_s: float = 0.1,
    cold_s: float | None = None,
    prepare_s: Sequence[float] = (0.001,) * 200,
    **more: Any,
) -> Profile:
    """One that is bound by its step, but for what is given."""
    phases = {"compute": phase(step_s), "warm": phase(warm_s, max(warm_s - step_s, 0.0))}
    phases["cold"] = phase(warm_s if cold_s is None else cold_s)
    made = Profile(
        loader="torch",
        samples=3200,
        batch_size=BATCH,
        workers=2,
        prefetch=2,
        in_order=True,
        max_lateness=0,
        rank=0,
        ranks=1,
        cores=8,
        prepare_s=tuple(prepare_s),
        prepare_cpu_share=1.0,
        collate_s=0.0,
        step_s=(step_s,) * BATCHES,
        transfer_s=0.0,
        loader_s=0.0,
        startup_s=0.1,
        phases=phases,
    )
    return replace(made, **more)
