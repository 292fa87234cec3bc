"""A rank that was measured, as predictions take it."""

from __future__ import annotations

import numpy as np

from minato_gpu.lab.analysis.profile import Profile, Storage


def a_profile(**changes: object) -> Profile:
    """128 samples of 10 ms for two workers, batches of 8, no step to speak of; storage that is far faster."""
    values: dict[str, object] = {
        "loader": "minato_gpu",
        "samples": 128,
        "batch_size": 8,
        "workers": 2,
        "prefetch": 2,
        "in_order": True,
        "max_lateness": 0,
        "rank": 0,
        "ranks": 1,
        "cores": 8,
        "prepare_s": tuple(np.random.default_rng(0).uniform(0.008, 0.012, 128).tolist()),
        "prepare_cpu_share": 0.0,
        "collate_s": 0.0,
        "step_s": (1e-4,),
        "transfer_s": 0.0,
        "loader_s": 1e-4,
        "startup_s": 0.3,
        "storage": Storage(1e9, 1e-3, 1.0, 1e5, 16.0),
        "persistent": True,
        "overlap": True,
    }
    return Profile(**{**values, **changes})  # type: ignore[arg-type]
