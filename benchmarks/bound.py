"""The least time that any loader could take: what the benchmarks measure efficiency against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def first_batch_s(costs_s: NDArray[np.floating[Any]], cores: int) -> float:
    """The least seconds for a batch of samples of these costs (CPU seconds), on all cores."""
    return max(float(costs_s.max()), float(costs_s.sum()) / cores)


def bound_s(first_s: float, work_s: float, steps_s: float, cores: int, ahead_s: float, left_s: float) -> float:
    """The least seconds for what was done between the clock's start and its end.

    That is a first batch (``first_s``), then ``work_s`` of work or ``steps_s`` of steps, whichever is longer.
    ``ahead_s`` of that work had been done before; ``left_s`` more was done for later epochs (CPU seconds).
    """
    working_s = max(0.0, work_s - ahead_s + left_s) / cores
    return max(0.0, first_s - ahead_s / cores) + max(steps_s, working_s)
