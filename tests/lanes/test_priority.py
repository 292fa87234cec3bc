"""Workers, and the device's stand-in on the CPU, give way to training."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.lanes.priority import give_way


def niceness() -> tuple[int, int]:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)


class Niceness(torch.utils.data.Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return niceness()


def test_what_a_thread_starts_gives_way_with_it() -> None:
    found: list[Any] = []

    def stand_back() -> None:
        give_way()
        child = threading.Thread(target=lambda: found.append(niceness()))
        child.start()
        child.join()
        found.append(niceness())

    before = niceness()
    thread = threading.Thread(target=stand_back)
    thread.start()
    thread.join()
    assert found == [(min(19, before[0] + 10), os.SCHED_BATCH)] * 2
    assert niceness() == before


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_worker_processes_give_way_and_training_does_not(context: str) -> None:
    before = niceness()
    loader: Any = DataLoader(Niceness(), batch_size=4, num_workers=2, multiprocessing_context=context)
    for nice, policy in loader:
        assert nice.tolist() == [min(19, before[0] + 10)] * 4
        assert policy.tolist() == [os.SCHED_BATCH] * 4
    assert niceness() == before
