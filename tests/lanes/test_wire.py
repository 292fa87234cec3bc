"""Messages of any size between the engine and its workers."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.lanes.base import Failure, Report
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.wire import LARGE, QueueChannel, SocketChannel
from minato_gpu.memory.status_board import ATTENTION
from tests.lanes.harness import open_links, piece, task
from tests.lanes.lanes import FORK, fetch, open_lane, reports_of


@pytest.mark.parametrize("nbytes", [10, LARGE - 500, LARGE + 500, 5_000_000], ids="{} bytes".format)
def test_tasks_of_any_size_arrive(nbytes: int) -> None:
    """A task larger than a socket takes goes through the engine's arena, which is free again afterwards."""
    key = "k" * nbytes
    with open_lane(len) as lane:
        store = Store(-1, lane.links)
        for chunk in (1, 2, 3):
            found = reports_of(lane, task(piece([key, key[1:]]), chunk=chunk))
            assert fetch(lane, store, found[chunk]) == [nbytes, nbytes - 1]
        assert lane.links.engine_arena.allocated == 0


def _fail(key: int) -> Any:
    if key:
        raise ValueError("x" * key)
    return key


@pytest.mark.parametrize("nbytes", [10, LARGE + 500, 3_000_000], ids="{} bytes".format)
def test_reports_of_any_size_arrive(nbytes: int) -> None:
    """An exception's message can be long; sent again and again, its memory is used again."""
    with open_lane(_fail) as lane:
        for chunk in range(1, 30):
            report = reports_of(lane, task(piece([0, nbytes]), chunk=chunk))[chunk][-1]
            failure = (report.items or [])[-1]
            assert isinstance(failure, Failure)
            with pytest.raises(ValueError, match="x" * 10) as caught:
                failure.error.reraise()
            assert str(caught.value).count("x") >= nbytes
        blocks = os.fstat(lane.links.arenas[0].fd).st_blocks * 512
        assert blocks < 4 * nbytes + 40 * 4096, "the worker's memory grows from report to report"


def test_a_report_that_cannot_be_sent_ends_the_worker() -> None:
    """A data set has closed what it does not own, say: to go on without a word would lose what it prepares."""
    with open_links(1) as links:
        channel = SocketChannel(links, 0)
        os.close(links.report_sender.detach())
        with pytest.raises(OSError, match="Bad file descriptor"):
            channel.send(Report(1, 1, 0, 0, 1, 0.0, 0.0, 0.0, True))


def test_more_tasks_than_the_sockets_hold_wait_their_turn() -> None:
    """Sending never blocks, though no worker takes anything; nothing is lost and the order stays."""
    gate = FORK.Event()

    def make(key: Any) -> Any:
        assert gate.wait(30)
        return key[:4]

    with open_lane(make) as lane:
        store = Store(-1, lane.links)
        tasks = [task(piece([f"{chunk:04}" + "-" * 60_000]), chunk=chunk) for chunk in range(1, 200)]
        for one in tasks:
            lane.send(one)
        gate.set()
        found = reports_of(lane, task(piece(["last"]), chunk=1000))
        assert list(found) == [*range(1, 200), 1000]
        for chunk in range(1, 200):
            assert fetch(lane, store, found[chunk]) == [f"{chunk:04}"]


def test_a_worker_wakes_the_engine_only_when_asked_to() -> None:
    with open_links(1) as links:
        channel = SocketChannel(links, 0)
        report = Report(1, 2, 0, 0, 1, 0.5, 0.0, 1.0, True)
        os.set_blocking(links.wake, False)
        channel.send(report)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(links.wake)
        links.board.words[ATTENTION] = 1
        channel.send(report)
        assert os.eventfd_read(links.wake) == 1
        assert Report(*pickle.loads(links.report_receiver.recv(1 << 18))) == report


def test_the_end_of_the_channel() -> None:
    """A worker gets None when the engine has closed, and its last report goes nowhere, quietly."""
    with open_links(1) as links:
        channel = SocketChannel(links, 0)
        links.close_parent_ends()
        assert channel.receive() is None
        channel.send(Report(1, 2, 0, 0, 1, 0.5, 0.0, 1.0, True))


def test_threads_share_objects_in_order() -> None:
    with open_links(1, arenas=False) as links:
        channel = QueueChannel(links)
        channel.tasks.put(task(piece([1])))
        channel.tasks.put(None)
        received = [channel.receive(), channel.receive()]
        assert received[0] is not None and received[0].pieces[0].keys == [1] and received[1] is None
        for number in range(5):
            channel.send(Report(1, number, 0, 0, 1, 0.5, 0.0, 1.0, True))
        assert [report.chunk for report in channel.reports] == list(range(5))


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_many_workers_reports_do_not_mix(threads: bool) -> None:
    """Three workers, reports small and large, all at once."""

    def make(key: int) -> Any:
        return {"key": key, "data": np.full(key % 7 * 1000, key), "text": torch.full((2,), key)}

    with open_lane(make, 3, threads=threads) as lane:
        store = Store(-1, lane.links)
        tasks = [task(piece(range(10 * chunk, 10 * chunk + 10)), chunk=chunk) for chunk in range(1, 60)]
        found = reports_of(lane, *tasks)
        for chunk in range(1, 60):
            for key, sample in zip(range(10 * chunk, 10 * chunk + 10), fetch(lane, store, found[chunk]), strict=True):
                assert sample["key"] == key and (sample["data"] == key).all() and sample["text"].tolist() == [key, key]
        if threads:
            assert threading.active_count() > 3
