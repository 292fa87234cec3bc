"""The peers' policies take as long as a calculation by hand says."""

from __future__ import annotations

import numpy as np

from minato_gpu.simulation.peers import BATCH_IN_ORDER, BATCH_OUT_OF_ORDER, simulate_peer
from minato_gpu.simulation.work import Work


def test_batches_in_rotation_take_what_a_hand_calculation_says() -> None:
    cpu = np.array([1.0, 1.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0])
    work = Work(cpu, cpu, 2, (8,), 2)
    assert simulate_peer(BATCH_IN_ORDER, work, 4, 0, 0.0).times.tolist() == [2.0, 10.0, 10.0, 12.0]
    assert simulate_peer(BATCH_OUT_OF_ORDER, work, 4, 8, 0.0).times.tolist() == [2.0, 4.0, 6.0, 10.0]
