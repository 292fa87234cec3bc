"""States that one thread asks for while others go on."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from minato_gpu import DataLoader
from minato_gpu.checkpoint.streams import plain_streams
from minato_gpu.lanes.streams import StreamState
from minato_gpu.memory.status_board import WorkerStatusBoard
from minato_gpu.sampling.delivered import DeliveredPositions
from minato_gpu.sampling.worker_streams import WorkerStreams
from tests.support.concurrency import alone
from tests.support.numbers import LENGTH, Plain


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_state_may_be_asked_for_while_batches_are_delivered(
    monkeypatch: pytest.MonkeyPatch, workers: int, ahead: int
) -> None:
    """By a thread that saves now and then, say."""
    add, rewound, inside = DeliveredPositions.add, DeliveredPositions.rewound, threading.Lock()

    def adds(self: DeliveredPositions, *given: Any, **more: Any) -> None:
        with alone(inside, "a state is made meanwhile"):
            add(self, *given, **more)

    def looks(self: DeliveredPositions, batches: int) -> DeliveredPositions:
        with alone(inside, "a batch is delivered meanwhile"):
            return rewound(self, batches)

    monkeypatch.setattr(DeliveredPositions, "add", adds)
    monkeypatch.setattr(DeliveredPositions, "rewound", looks)
    more: dict[str, Any] = {"worker_kind": "thread"} if workers else {}
    loader: Any = DataLoader(Plain(), 4, num_workers=workers, **more)
    over, states = threading.Event(), list[Any]()

    def save() -> None:
        while not over.is_set():
            states.append(loader.state_dict(ahead)["progress"])

    batches = iter(loader)
    for _ in range(ahead):
        next(batches)
    with ThreadPoolExecutor() as pool:
        saving = pool.submit(save)
        try:
            for _ in batches:
                if saving.done():
                    break
        except BaseException:
            over.set()
            raise
        over.set()
        assert saving.exception() is None or "ahead" in str(saving.exception())
    assert states and all(one["below"] == min(4 * one["batches"], LENGTH) for one in states)


def _told(at: int, *, ended: bool = False) -> StreamState:
    return StreamState(pickle.dumps(("dataset", {"at": at}, None)), ended)


def test_a_state_says_that_a_stream_is_at_its_end_only_with_what_it_told_there() -> None:
    """The pump thread learns of it, and the consumer may ask at any moment."""
    streams, states = WorkerStreams(1), list[Any]()

    class Asked(set[int]):
        def add(self, worker: int) -> None:
            super().add(worker)
            states.append(plain_streams(streams, 0, 1))

    class Popped(dict[int, int]):
        def pop(self, *given: Any) -> Any:
            found = super().pop(*given)
            states.append(plain_streams(streams, 0, 1))
            return found

    streams.turns[0] = 0
    streams.told[0] = _told(1)
    streams.delivered(0)
    streams.ended, streams.turns = Asked(), Popped({1: 0})
    streams.exhausted(1, 0, _told(7, ended=True))
    states.append(plain_streams(streams, 0, 1))
    found = [(state["streams"][0]["ended"], state["streams"][0]["state"]["state"]["at"]) for state in states]
    assert found[-1] == (True, 7) and set(found) <= {(False, 1), (True, 7)}


def test_a_board_that_is_being_closed_is_told_nothing() -> None:
    board = WorkerStatusBoard(1)
    board.words.release()
    board.expect_saves(True)
    board.words = memoryview(bytearray(8)).cast("q")
    board.close()
