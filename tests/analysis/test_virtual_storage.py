"""Storage under a virtual clock: rate, latency, what is kept, and what is told when."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from minato_gpu.analysis.profile import Storage
from minato_gpu.analysis.virtual_epochs import Shuffles
from minato_gpu.analysis.virtual_storage import Simulated, Tier, VirtualStorage

COUNT, NBYTES = 64, 10_000


def read(
    storage: Simulated, tier: Tier | None = None, epochs: int = 1, shards: int = 1
) -> tuple[list[float], list[int]]:
    """Seconds until the last sample of each epoch is told, one epoch after the other, and reads."""
    reader = VirtualStorage(storage, Shuffles(COUNT * shards, shards, 0), 8, tier, shards=shards)
    now, took = 0.0, []
    for epoch in range(epochs):
        begun = now
        told: set[int] = set()
        serials = range(epoch * COUNT, (epoch + 1) * COUNT)
        reader.begin(now, epoch)
        reader.want(now, epoch, serials)
        while len(told) < COUNT:
            came = reader.advance(float("inf"))
            assert came is not None and came.at >= now
            now, fresh = came.at, set(came.serials)
            assert fresh and not fresh & told and fresh <= set(serials)
            told |= fresh
        took.append(now - begun)
        reader.release(now, serials)
    return took, reader.reads


def storage(shards: int = 1, *, files: bool = False, **values: object) -> Simulated:
    """``values``: of the storage as it was measured, or as it is simulated."""
    own = {name: values.pop(name) for name in ("parts", "request_s", "byte_s", "there") if name in values}
    values = {"bytes_per_s": 1e6, "latency_s": 0.0, "requests": 1.0, "nbytes": 1.0, "concurrency": 1.0, **values}
    measured = Storage(remote=not files, **values)  # type: ignore[arg-type]
    return Simulated(measured, np.full(COUNT * shards, NBYTES), **own)  # type: ignore[arg-type]


def test_requests_share_the_rate() -> None:
    took, reads = read(storage())
    assert took[0] == pytest.approx(COUNT * NBYTES / 1e6, abs=0.01) and reads == [COUNT]


def test_latencies_pass_side_by_side_and_files_are_read_by_fewer() -> None:
    urls, _ = read(storage(bytes_per_s=1e12, latency_s=0.1, spread=0.0))
    files, _ = read(storage(bytes_per_s=1e12, latency_s=0.1, spread=0.0, files=True))
    assert urls[0] == pytest.approx(0.1, abs=0.01)
    assert 0.2 < files[0] <= 0.51  # sixteen at first, eight when half of them are there


def test_the_event_loop_does_one_thing_after_the_other() -> None:
    took, _ = read(storage(bytes_per_s=1e12, request_s=5e-3, byte_s=1e-3 / NBYTES))
    assert took[0] == pytest.approx(COUNT * 6e-3, rel=0.05)


def test_samples_of_several_parts_are_there_when_all_are() -> None:
    took, reads = read(storage(parts=2, shares=(0.9, 0.1), files=True))
    assert took[0] == pytest.approx(COUNT * NBYTES / 1e6, abs=0.02) and reads == [2 * COUNT]


def test_what_the_page_cache_has_is_not_read() -> None:
    took, reads = read(storage(there=frozenset(range(COUNT))))
    assert took[0] == 0.0 and reads == [0]


@pytest.mark.parametrize("policy", ["", "minio"])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_memory_keeps_its_share(policy: str, share: float) -> None:
    """One reader of full shuffles: every later epoch hits what was kept, and nothing else."""
    took, reads = read(storage(), Tier(share, policy), epochs=3)
    assert reads == [COUNT, *[round((1 - share) * COUNT)] * 2]
    assert took[2] == pytest.approx((1 - share) * took[0], abs=0.02)


def test_a_policy_that_is_told_is_kept_to() -> None:
    """An epoch reads half of the set: who knows the orders keeps what comes back soonest."""
    reads = {policy: read(storage(2), Tier(0.25, policy), 10, 2)[1][4:] for policy in ("next-use", "minio", "lru", "")}
    assert reads[""] == reads["next-use"]
    assert sum(reads["next-use"]) < 0.8 * sum(reads["minio"]) and sum(reads["next-use"]) < 0.8 * sum(reads["lru"])
    assert reads["lru"] != reads["minio"]


def test_a_second_request_cuts_the_tail() -> None:
    """Of URLs; files are asked for once. One request in fifty takes fifty times as long."""

    class Tail(Simulated):
        def wait_s(self, rng: Random) -> float:
            return super().wait_s(rng) * (50.0 if rng.random() < 0.02 else 1.0)

    told = (storage(bytes_per_s=1e12, latency_s=0.01, files=files) for files in (False, True))
    urls, files = (read(Tail(each.measured, each.nbytes), epochs=20)[0] for each in told)
    assert np.mean(files) > 0.3 and np.mean(urls) < 0.1


def test_second_requests_of_what_only_queues_take_bytes_of_the_others() -> None:
    """No more than one request in twenty, and sixteen at once."""
    urls, files = (read(storage(files=files), epochs=8)[0] for files in (False, True))
    assert 1.0 < sum(urls) / sum(files) < 1.1
