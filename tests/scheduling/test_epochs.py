"""Epochs overlap in the window, but a chunk has one epoch, and with it one seed."""

from __future__ import annotations

import pytest

from minato_gpu.samples import SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler

SIZE = 4


def chunks_of_two_epochs(lane: str) -> list[m.Chunk]:
    """Two epochs of one batch each, admitted while the lane is closed, then as many chunks as it takes."""
    scheduler = Scheduler(Policy(window=4 * SIZE))
    device = [1e-5] * SIZE if lane != m.CPU else None
    for epoch in range(2):
        cpu = [1e-5 if device is None else 10.0] * SIZE
        scheduler.handle(m.Admitted(0.0, SourceBatch(epoch), epoch, TicketId(epoch * SIZE), SIZE, cpu, device))
    chunks: list[m.Chunk] = []
    instructions = scheduler.handle(m.LaneOpened(0.0, lane, 1, m.CPU if lane == m.CPU else m.DEVICE))
    time = 0.0
    while instructions:
        sent = [each.chunk for each in instructions if isinstance(each, m.Dispatch)]
        chunks += sent
        instructions = []
        for chunk in sent:
            time += 1e-3
            instructions += scheduler.handle(m.Finished(time, chunk.number, chunk.size, 1e-4))
    return chunks


@pytest.mark.parametrize("lane", [m.CPU, "device"])
def test_no_chunk_spans_two_epochs(lane: str) -> None:
    chunks = chunks_of_two_epochs(lane)
    serials = [serial for chunk in chunks for lo, hi in chunk.spans for serial in range(lo, hi)]
    assert sorted(serials) == list(range(2 * SIZE))
    assert all(len({serial // SIZE for lo, hi in chunk.spans for serial in range(lo, hi)}) == 1 for chunk in chunks)
    assert any(chunk.size > 1 for chunk in chunks)
