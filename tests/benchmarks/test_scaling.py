"""The scaling benchmark: its cells, its data, its bound."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from benchmarks.isolate import descendants_cpu_s
from benchmarks.scaling.cells import BATCH_SIZE, SPREADS, Cell
from benchmarks.scaling.measure import Bare, Plan


def _plan(cell: Cell, batches: int = 20) -> Plan:
    costs_s = cell.costs_s(BATCH_SIZE * batches)
    bare = Bare(1e-4, 1.0, 1.1, 300, 0.01)
    return Plan(cell, costs_s, np.empty(0, np.int64), bare, bare, 0.0)


@pytest.mark.parametrize("spread", SPREADS)
def test_the_mean_of_a_cell_is_its_cost(spread: str) -> None:
    costs_s = Cell(8, 3, spread).costs_s(6400)
    assert costs_s.mean() == pytest.approx(3e-3) and costs_s.min() > 0
    if spread == "tail":
        assert (costs_s > 10 * np.median(costs_s)).mean() == 0.05
        assert costs_s.max() == pytest.approx(40 * costs_s.min())


def test_the_bound_is_work_or_steps() -> None:
    plan = _plan(Cell(4, 3, "half"))
    assert plan.work_s == pytest.approx(20 * BATCH_SIZE * 3.1e-3 / 4)
    assert plan.bound_s() == plan.work_s and plan.bound_s(ahead_s=0.4) == pytest.approx(plan.work_s - 0.1)
    assert plan.bound_s(ahead_s=0.4, left_s=0.4) == pytest.approx(plan.work_s)
    waiting, working = _plan(Cell(4, 3, "half", 0.9)), _plan(Cell(4, 3, "half", 1.05))
    assert waiting.bound_s() == pytest.approx(waiting.batches * waiting.step_s)
    assert working.bound_s() == pytest.approx(working.work_s + working.step_s)


_PARENT = """import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.2: pass"
subprocess.run([sys.executable, "-S", "-c", burn], check=True)
print(flush=True)
input()
"""


def test_the_time_of_grandchildren_that_have_ended_counts() -> None:
    """Such are the workers that a spawner has started and replaced."""
    before = descendants_cpu_s()
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline()
        found = descendants_cpu_s() - before
        parent.communicate(b"\n")
    assert found > 0.15
