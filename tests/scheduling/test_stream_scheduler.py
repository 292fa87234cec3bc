"""Streams of iterable data sets: PyTorch's order exactly, or by completion within the lateness."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from minato_gpu.samples import OutputBatch
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.stream_scheduler import StreamScheduler


class Streams:
    """Workers that answer in the order that the test chooses; ``lengths``: batches of each worker's stream."""

    def __init__(self, lengths: list[int], prefetch: int, **policy: Any) -> None:
        self.scheduler = StreamScheduler(Policy(window=1000, **policy), len(lengths), prefetch)
        self.lengths = lengths
        self.next = [0] * len(lengths)
        self.prefetch = prefetch
        self.queues: list[list[m.Chunk]] = [[] for _ in lengths]
        self.content: dict[int, tuple[int, int]] = {}
        self.composed: dict[int, m.Compose] = {}
        self.delivered: list[tuple[int, int]] = []
        self.tell(m.LaneOpened(0.0, m.CPU, len(lengths)))

    def tell(self, event: m.Event) -> None:
        for instruction in self.scheduler.handle(event):
            if isinstance(instruction, m.Dispatch):
                self.queues[instruction.chunk.worker].append(instruction.chunk)
            elif isinstance(instruction, m.Compose):
                assert instruction.order == len(self.delivered) + len(self.composed)
                self.composed[instruction.order] = instruction
        undelivered = sum(map(len, self.queues)) + len(self.content) - len(self.delivered)
        assert undelivered <= self.prefetch * len(self.lengths)

    def answer(self, worker: int, nbytes: int = 10) -> None:
        """The worker is through with its next ticket."""
        chunk = self.queues[worker].pop(0)
        if self.next[worker] == self.lengths[worker]:
            self.tell(m.Exhausted(0.0, chunk.number))
            return
        self.content[chunk.number] = (worker, self.next[worker])
        self.next[worker] += 1
        self.tell(m.Finished(0.0, chunk.number, 1, 0.1, nbytes))

    def ask(self) -> bool:
        """The consumer takes a batch if there is one."""
        order = len(self.delivered)
        if order not in self.composed:
            self.tell(m.Asked(0.0))
        if order not in self.composed:
            return False
        (span,) = self.composed.pop(order).spans
        self.delivered.append(self.content[span[0]])
        self.tell(m.Delivered(0.0, OutputBatch(order), in_flight=10 * (len(self.content) - len(self.delivered))))
        return True

    def run(self, choices: list[int]) -> list[tuple[int, int]]:
        """Answer and ask in the order given, then until all is delivered."""
        for step in range(10_000):
            busy = [worker for worker, queue in enumerate(self.queues) if queue]
            choice = choices[step % len(choices)] if choices else step
            if choice % 3 == 0 and self.ask():
                continue
            if busy:
                self.answer(busy[choice % len(busy)])
            elif not self.ask():
                break
        assert self.scheduler.end == len(self.delivered)
        return self.delivered


def turns(lengths: list[int]) -> list[tuple[int, int]]:
    """Round robin over the workers that still have something."""
    return [(w, turn) for turn in range(max(lengths)) for w in range(len(lengths)) if turn < lengths[w]]


LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=4)
CHOICES = st.lists(st.integers(0, 100), max_size=60)


@given(LENGTHS, st.integers(1, 3), CHOICES)
def test_in_order_is_one_batch_of_each_stream_in_turn(lengths: list[int], prefetch: int, choices: list[int]) -> None:
    assert Streams(lengths, prefetch).run(choices) == turns(lengths)


@given(LENGTHS, st.integers(1, 3), CHOICES, st.integers(1, 4))
def test_out_of_order_nothing_comes_later_than_allowed(
    lengths: list[int], prefetch: int, choices: list[int], lateness: int
) -> None:
    delivered = Streams(lengths, prefetch, fixed=False, max_lateness=lateness).run(choices)
    assert sorted(delivered) == sorted(turns(lengths))
    for worker in range(len(lengths)):
        assert [turn for w, turn in delivered if w == worker] == list(range(lengths[worker]))


@given(LENGTHS, CHOICES)
def test_a_tiny_budget_only_makes_it_slower(lengths: list[int], choices: list[int]) -> None:
    assert Streams(lengths, 2, budget_bytes=15).run(choices) == turns(lengths)


def test_a_slow_stream_does_not_stop_the_others_within_the_lateness() -> None:
    streams = Streams([9, 9], 2, fixed=False, max_lateness=3)
    for _ in range(4):
        if streams.queues[1]:
            streams.answer(1)
        streams.ask()
    assert streams.delivered == [(1, 0), (1, 1), (1, 2)]
    assert not streams.ask()
    assert streams.scheduler.stall_cause() in ("lateness", "preparation")
    streams.answer(0)
    assert streams.ask()
    assert streams.delivered[-1] == (0, 0)


class Counting(IterableDataset[Any]):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        return iter([(info.id, i) for i in range(self.lengths[info.id])])


def test_the_order_is_pytorchs() -> None:
    lengths = [5, 1, 3]
    loader = DataLoader(Counting(lengths), batch_size=None, num_workers=3, collate_fn=lambda item: torch.tensor(item))
    assert [tuple(item.tolist()) for item in loader] == turns(lengths)
    assert Streams(lengths, 2).run([]) == turns(lengths)
