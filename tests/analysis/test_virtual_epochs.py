"""Ranks under one virtual clock: they share the storage's rate, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minato_gpu.analysis.profile import Storage
from minato_gpu.analysis.virtual_epochs import Drawn, Run, simulated_together
from tests.analysis.conftest import a_profile

NBYTES = 1e5
SAMPLES = 128


def _runs(*ranks: dict[str, Any], epochs: int = 1) -> tuple[list[Run], Drawn]:
    """With storage that gives 50 samples a second, a quarter of what two workers prepare."""
    slow = Storage(50 * NBYTES, 1e-3, 1.0, NBYTES, 16.0, remote=True)
    runs = [Run(a_profile(**{"storage": slow, "overlap": False, **each})) for each in ranks]
    steps = np.zeros((epochs, runs[0].profile.batches))
    return runs, Drawn(np.full(SAMPLES, 0.01), steps, np.arange(SAMPLES))


def _seconds(runs: list[Run], drawn: Drawn) -> list[float]:
    return [float(each.seconds[0]) for each in simulated_together(runs, drawn, 0)]


def test_ranks_share_the_rate_of_their_storage() -> None:
    runs, drawn = _runs({}, {}, {})
    (alone,) = _seconds(runs[:1], drawn)
    assert alone == runs[0].simulated(drawn, 0).seconds[0] == pytest.approx(SAMPLES / 50, rel=0.1)
    together = _seconds(runs, drawn)
    assert max(together) == pytest.approx(3 * alone, rel=0.02) and min(together) > 2.7 * alone


def test_who_reads_nothing_of_it_is_not_held_up() -> None:
    runs, drawn = _runs({}, {"storage": None})
    reads, other = _seconds(runs, drawn)
    assert reads == pytest.approx(_seconds(runs[:1], drawn)[0])
    assert other == pytest.approx(SAMPLES * 0.01 / 2, rel=0.05)


def test_ranks_that_train_together_wait_for_each_other_after_each_epoch() -> None:
    """The one that reads nothing waits for the other, and then ends its last epoch as early as alone."""
    runs, drawn = _runs({}, {"storage": None}, epochs=3)
    slow, fast = (np.cumsum(each.seconds) for each in simulated_together(runs, drawn, 0, meet=True))
    assert slow == pytest.approx(np.cumsum(runs[0].simulated(drawn, 0).seconds), rel=0.02)
    own = float(fast[0])
    assert fast[1:] == pytest.approx(slow[:-1] + own, rel=0.02)
    assert fast[1] < slow[1]
