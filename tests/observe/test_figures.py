"""What a loader has done between two answers."""

from __future__ import annotations

from typing import Any

import pytest

from minato_gpu.observe.figures import figures
from tests.observe.made import lane, state


def test_rates_are_of_the_time_between_two_answers() -> None:
    one = state(10.0, samples=1000, lanes={"cpu": lane(1000, 0.9, 2)})
    two = state(12.0, samples=1100, lanes={"cpu": lane(1100, 10.0 / 12.0, 2)})
    found = figures(one, two)
    names = ("samples_per_s", "samples_delivered", "samples_expected")
    assert [found.of_all[name] for name in names] == [50.0, 1100, 1000]
    cpu = found.lanes["cpu"]
    assert cpu["samples_per_s"] == 50.0 and cpu["busy_share"] == pytest.approx(0.5)
    assert (cpu["service_p50_s"], cpu["service_p99_s"]) == (0.25, 0.75)


@pytest.mark.parametrize("before", [None, state(9.0, epoch=3, samples=900)])
def test_since_the_epoch_began_where_there_is_no_earlier_answer_of_it(before: Any) -> None:
    assert figures(before, state(10.0, epoch=4, samples=100, elapsed=4.0)).of_all["samples_per_s"] == 25.0


def test_waits_and_their_causes() -> None:
    def waited(fetch: float, preparation: float, total: float) -> dict[str, Any]:
        stalls = {"preparation": {"count": 1, "seconds": preparation}, "fetch": {"count": 1, "seconds": fetch}}
        return {"stalls": stalls, "wait_s": {"total": total}}

    found = figures(state(10.0, **waited(1.0, 5.0, 6.0)), state(20.0, **waited(4.0, 6.0, 10.5)))
    assert found.of_all["wait_share"] == pytest.approx(0.45)
    assert list(found.stall_shares) == ["fetch", "preparation"]
    assert list(found.stall_shares.values()) == pytest.approx([0.3, 0.1])
    late = figures(state(10.0, **waited(0.0, 0.0, 0.0)), state(11.0, **waited(30.0, 0.0, 30.0)))
    assert late.of_all["wait_share"] == late.stall_shares["fetch"] == 1.0  # a wait is counted when it is over


def test_reads_and_hits() -> None:
    def read(reads: int, hits: int, misses: int) -> dict[str, Any]:
        tiers = {"memory": {"hits": hits, "misses": misses}, "disk": {"hits": 0, "misses": 0}}
        return {"reads": {"reads": reads, "bytes": 1000 * reads}, "cache": tiers}

    found = figures(state(10.0, **read(10, 0, 100)), state(15.0, **read(20, 30, 110)))
    assert (found.of_all["reads_per_s"], found.of_all["read_bytes_per_s"]) == (2.0, 2000.0)
    assert found.hit_shares == {"memory": 0.75, "disk": None}
    idle = figures(state(15.0, **read(20, 30, 90)), state(16.0, **read(20, 30, 90)))
    assert idle.hit_shares["memory"] == 0.25
    assert figures(None, state(1.0)).of_all["reads_per_s"] is None
    missed = figures(state(15.0, **read(20, 30, 90)), state(16.0, **read(20, 30, 91)))
    assert missed.hit_shares["memory"] == 0.0
