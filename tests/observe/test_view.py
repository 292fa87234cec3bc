"""What ``minato-gpu top`` shows, in 80 columns."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console, Group

from minato_gpu.observe import view
from minato_gpu.observe.asking import JobState
from minato_gpu.observe.figures import figures
from tests.observe.made import lane, state

LANES = {"cpu": lane(123_456, 0.99, 64), "device": lane(1, 0.001, 1), "device:1": lane(99_999, 1.0, 1)}
STALLS = {cause: {"count": 9, "seconds": 3.3} for cause in ("preparation", "fetch", "device", "budget", "lateness")}


def _shown(*loaders: Any, rank: str | None = None, command: str = "train.py") -> str:
    out = StringIO()
    job = JobState(4711, command, rank, list(loaders))
    Console(file=out, width=80).print(Group(*view.job(job, [figures(None, one) for one in loaders], 80)))
    return out.getvalue()


def test_it_fits_into_eighty_columns() -> None:
    tiers = {name: {"hits": 99, "misses": 1} for name in ("memory", "disk")}
    reads = {"reads": 123_456, "bytes": 98_765_432_100}
    large = state(1.0, name="A" * 40, samples=987_654_321, lanes=LANES, stalls=STALLS, reads=reads, cache=tiers)
    said = _shown(large, state(1.0), rank="7", command="/a/long/path/to/train.py " + "--more " * 40)
    assert max(map(len, said.splitlines())) <= 80
    for word in ("device:1", "123,456", "99%", "250", "750", "Photographs-1", "reads/s"):
        assert word in said, said


def test_what_it_says() -> None:
    said = _shown(state(10.0, epoch=2, samples=500, stalls=STALLS, wait_s={"total": 5.0}), rank="3")
    assert "process 4711, rank 3: train.py" in said
    assert "Photographs-1  epoch 2  [##########..........] 50%  500 of 1,000" in said
    assert "50.0 samples/s; the training loop waited 100%: preparation 33%, fetch 33%" in said
    assert "0 samples failed; 12.0 kB in flight, 34.0 MB at most" in said
    assert "no loader has begun an epoch" in _shown()
    assert "500 samples" in _shown(state(1.0, samples=500, samples_expected=None))


@pytest.mark.parametrize(
    ("nbytes", "said"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e9, "2.5 GB"), (4e15, "4000.0 TB")]
)
def test_sizes(nbytes: float, said: str) -> None:
    assert view.size(nbytes) == said


def test_a_row_is_flat() -> None:
    found = figures(None, state(10.0, samples=500, lanes=LANES, stalls=STALLS))
    row = found.row()
    assert row["samples_per_s"] == 50.0 and row["lane_device:1_slots"] == 1
    assert row["stall_fetch_share"] == pytest.approx(0.33)
    assert not [value for value in row.values() if isinstance(value, (dict, list))]
