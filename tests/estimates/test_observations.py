"""What is learned of reports: of a device's, nothing from samples that it was never given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from minato_gpu.estimates.estimator import Observed
from minato_gpu.estimates.observations import observe
from minato_gpu.lanes.base import Failure, Part, Report, failure
from minato_gpu.scheduling import messages as m
from tests.support.tickets import spans

BAD: Failure = failure(ValueError("cannot be read"), "here")


class Learned:
    """An estimator that notes what it is told."""

    by_serial = True

    def __init__(self) -> None:
        self.costs: list[tuple[int, float]] = []
        self.forgotten: list[int] = []

    def took(self, samples: int, seconds: float) -> None:
        pass

    def not_measured(self, spans: Any) -> None:
        self.forgotten += [serial for lo, hi in spans for serial in range(lo, hi)]

    def measured(self, lane: str, seen: Observed) -> None:
        assert seen.keys == seen.serials
        assert seen.parts is None or seen.handed is None or len(seen.parts) == len(seen.handed) == len(seen.serials)
        self.costs += zip(seen.serials, seen.seconds, strict=True)


def learned(lane: str, items: list[Any], *, parts: bool) -> Learned:
    count, found = len(items), Learned()
    chunk = m.Chunk(0, lane, "run", spans((4, 4 + count)), 0.0)
    times = [0.0 if item is BAD else 2.0 for item in items]
    told: list[Part | None] | None = [(1, (each,)) for each in times] if parts else None
    report = Report(1, 0, 0, 0, count, sum(times), 0.0, 1.0, True, items=items, times=times, parts=told)
    window = SimpleNamespace(
        key=lambda serial: serial, keys=lambda spans: [serial for lo, hi in spans for serial in range(lo, hi)]
    )
    to: Any = found
    of: Any = SimpleNamespace(window=window)
    observe(lane, chunk, chunk.spans, report, to, of)
    return found


@pytest.mark.parametrize("parts", [False, True])
def test_a_device_is_not_free_because_samples_could_not_be_read(parts: bool) -> None:
    found = learned(m.DEVICE, [None, BAD, None], parts=parts)
    assert found.costs == [(4, 2.0), (6, 2.0)] and found.forgotten == [5]
    found = learned(m.DEVICE, [BAD, BAD], parts=parts)
    assert found.costs == [] and found.forgotten == [4, 5]


def test_on_the_cpu_they_cost_what_they_took() -> None:
    assert len(learned(m.CPU, [None, BAD], parts=False).costs) == 2
