"""What a run that was given up still tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from minato_gpu.lanes.base import Report
from minato_gpu.pump import Pump


def test_a_layout_that_was_found_is_not_lost_with_its_run() -> None:
    """A worker that has described a sample does not do so again."""
    report = Report(0, 3, 0, 0, 1, 0.0, 0.0, 0.0, True, layout=b"found")
    lane = SimpleNamespace(name="cpu", receive=lambda: [report])
    learned: list[bytes] = []
    assembly: Any = SimpleNamespace(holdings=None, loading=None, learn=learned.append)
    scheduler: Any = SimpleNamespace()
    pump = Pump({"cpu": lane}, assembly, lambda: scheduler)
    pump._run = 1
    pump.receive()
    assert learned == [b"found"]
