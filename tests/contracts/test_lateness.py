"""P3 and P5: nothing comes later than promised, and within that nothing waits for a slow sample; workers that come and
go while an epoch runs change nothing."""

from __future__ import annotations

import multiprocessing
import random
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch

from minato_gpu.scheduling.worker_count import WorkerCount
from tests.contracts.datasets import Costly, Made
from tests.contracts.modes import BOUNDED, MINATO, Mode
from tests.support.waiting import wait_until

_FORK = multiprocessing.get_context("fork")


class _Blocked:
    """A sample function in which one sample waits until the test lets it go."""

    def __init__(self, blocked: int) -> None:
        self.blocked = blocked
        self.gate = _FORK.Event()
        self.waiting = _FORK.Semaphore(0)

    def __call__(self, index: int) -> Any:
        if index == self.blocked:
            self.waiting.release()
            assert self.gate.wait(60), "the test never let it go"
        return torch.tensor(index)


@pytest.mark.parametrize("blocked", [0, 1, 5])
@pytest.mark.parametrize("mode", BOUNDED, ids=lambda mode: mode.name)
def test_a_blocked_sample_delays_no_other_batch_until_the_limit(mode: Mode, blocked: int) -> None:
    """All batches that the limit allows come while it is still blocked; then it comes, in the last one allowed."""
    make = _Blocked(blocked)
    iterator = iter(mode.loader(Made(80, make), 4, num_workers=2))
    allowed = blocked // 4 + mode.lateness
    batches = [next(iterator).tolist() for _ in range(allowed)]
    assert make.waiting.acquire(timeout=60)
    make.gate.set()
    batches += [batch.tolist() for batch in iterator]
    flat = [index for batch in batches for index in batch]
    assert sorted(flat) == list(range(80))
    assert blocked not in flat[: 4 * allowed]
    assert all(number - index // 4 <= mode.lateness for number, batch in enumerate(batches) for index in batch)


@pytest.mark.parametrize("mode", BOUNDED[:2], ids=lambda mode: mode.name)
def test_a_stall_at_the_limit_is_counted_with_its_cause(mode: Mode) -> None:
    make = _Blocked(0)
    loader = mode.loader(Made(80, make), 4, num_workers=2)
    iterator = iter(loader)
    for _ in range(mode.lateness):
        next(iterator)
    before = sum(stall["count"] for stall in loader.stats()["stalls"].values())
    consumer = threading.Thread(target=lambda: received.extend(next(iterator).tolist()))
    received: list[int] = []
    consumer.start()
    assert wait_until(lambda: _is_inside(consumer, "_await"))
    make.gate.set()
    consumer.join()
    assert 0 in received
    stalls = loader.stats()["stalls"]
    assert sum(stall["count"] for stall in stalls.values()) > before
    assert any("late" in cause for cause in stalls), stalls


def _is_inside(thread: threading.Thread, function: str) -> bool:
    """Whether the thread is in a Python function of that name, at whatever depth."""
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


_MOST = 4


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number of workers with every batch."""
    rng = random.Random(7)

    def delivered(count: WorkerCount, *_: Any) -> bool:
        before, count.workers = count.workers, rng.randint(count.least, count.most)
        return count.workers != before

    monkeypatch.setattr(WorkerCount, "delivered", delivered)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_all_comes_while_they_come_and_go(mode: Mode, persistent: bool) -> None:
    loader = mode.loader(Costly(120), 4, num_workers=1, persistent_workers=persistent, max_workers=_MOST)
    at_work = set()
    for stop in (3, 30, 30):
        received = []
        for number, batch in enumerate(loader):
            received += batch.tolist()
            at_work.add(loader.stats()["workers"]["at_work"])
            if number == stop:
                break
        assert len(received) == 4 * (stop + 1) or sorted(received) == list(range(120))
    assert at_work == set(range(1, _MOST + 1))
