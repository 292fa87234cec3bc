"""Counters that go on rising while epochs, and sets of workers, follow each other."""

from __future__ import annotations

from typing import Any

import pytest

from minato_gpu.observe.counting import OTHER, carried, counters, summed
from tests.observe.made import lane, stats


def test_what_stats_count() -> None:
    found = counters(
        stats(
            100,
            elapsed=8.0,
            lanes={"cpu": lane(90, 0.5, 2)},
            stalls={"fetch": {"count": 2, "seconds": 1.5}},
            wait_s={"total": 2.0},
            reads={"reads": 5, "bytes": 500, "failed": 1, "by_workers": 2},
            cache={"memory": {"hits": 3, "misses": 1}},
        )
    )
    assert found["samples", ""] == 100.0 and found["batches", ""] == 10.0
    assert found["lane_busy_seconds", "cpu"] == pytest.approx(8.0) and found["lane_samples", "cpu"] == 90.0
    assert (found["wait_seconds", "fetch"], found["wait_seconds", OTHER], found["stalls", "fetch"]) == (1.5, 0.5, 2.0)
    assert found["reads", ""] == 5.0 and found["read_bytes", ""] == 500.0 and found["cache_hits", "memory"] == 3.0


def test_a_stall_that_is_counted_before_its_wait_makes_no_negative_wait() -> None:
    found = counters(stats(stalls={"fetch": {"count": 1, "seconds": 30.0}}, wait_s={"total": 0.5}))
    assert found["wait_seconds", OTHER] == 0.0


def _with_reads(samples: int, reads: int) -> dict[Any, float]:
    return counters(stats(samples, reads={"reads": reads, "bytes": 10 * reads, "failed": 0}))


@pytest.mark.parametrize("stays", [True, False], ids=["the same workers", "others"])
def test_epochs_add_up(stays: bool) -> None:
    """Also where an epoch has begun with more than the last one had, of samples that were prepared ahead."""
    before: dict[Any, float] = {}
    told = []
    of_workers = 0
    for ended, begun in ((100, 0), (100, 0), (100, 200), (300, 0)):
        of_workers = of_workers + ended if stays else ended
        last = _with_reads(ended, of_workers)
        told.append(summed(before, last))
        fresh = _with_reads(begun, of_workers if stays else 0)
        before = carried(before, last, fresh)
        told.append(summed(before, _with_reads(0, of_workers if stays else 0)))
    assert [one["samples", ""] for one in told] == [100, 100, 200, 200, 300, 300, 600, 600]
    assert [one["reads", ""] for one in told] == [100, 100, 200, 200, 300, 300, 600, 600]


def test_what_only_an_earlier_epoch_knew_stays() -> None:
    last = counters(stats(stalls={"fetch": {"count": 1, "seconds": 2.0}}, wait_s={"total": 2.0}))
    before = carried({}, last, counters(stats()))
    assert summed(before, counters(stats()))["wait_seconds", "fetch"] == 2.0
