"""Batches that a worker joins (jobs), because their samples cannot be stacked in place."""

from __future__ import annotations

from minato_gpu.engine.deaths import Deaths
from minato_gpu.lanes.base import Item, Local, Reference, Task
from minato_gpu.lanes.contract import Exit, Lane
from minato_gpu.memory.status_board import JOINING, Claim
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.samples import OutputBatch
from minato_gpu.scheduling import messages as m
from minato_gpu.window.assembly import Assembly


class Jobs:
    """The jobs of one run, by the order of their batches."""

    def __init__(self, assembly: Assembly, deaths: Deaths) -> None:
        self._assembly = assembly
        self._deaths = deaths
        self._spans: dict[OutputBatch, tuple[m.TicketSpan, ...]] = {}  # of those that no worker has been sent
        self._anew: set[OutputBatch] = set()  # batches whose samples the job is to prepare anew
        self._pads: dict[OutputBatch, Task] = {}  # the only sample of a batch that has lost its own

    def need(self, order: OutputBatch) -> None:
        """The composed batch is to be joined."""
        self._spans[order] = self._assembly.spans(order)

    def pad(self, order: OutputBatch, place: int, task: Task) -> None:
        """Batch ``order``, number ``place`` in its epoch, has lost all its samples, and must come all the same (see
        ``Batches.pad``): it is to be made of the one that ``task`` is about."""
        self._assembly.expect_another(order, place)
        self._pads[order] = task

    def task(self, chunk: m.Chunk, run: int, seeds: dict[int, int], logs: dict[int, Telemetry]) -> Task:
        """What a worker is told that is to join the chunk's batch."""
        if chunk.order in self._pads:
            return self._pads[chunk.order]._replace(chunk=chunk.number)
        spans, window = self._spans.pop(chunk.order), self._assembly.window
        epoch, pieces = window.at(spans[0][0]).epoch, window.described(spans)
        items = None if chunk.order in self._anew else self._lying(spans, logs[epoch])
        return Task(run, chunk.number, "collate", epoch, seeds[epoch], pieces, None, items)

    def _lying(self, spans: tuple[m.TicketSpan, ...], log: Telemetry) -> list[Reference] | None:
        """Where the samples lie; None where a device does not give them up: the job then prepares them itself."""
        try:
            return self._assembly.references(spans)
        except Exception:
            log.repeated += m.count(spans)
            return None

    @staticmethod
    def send(lane: Lane, task: Task, log: Telemetry) -> None:
        """Have a batch joined. What the device lane left in this process may be nothing that can be sent to a worker:
        the job then prepares the samples itself."""
        try:
            lane.send(task)
        except Exception:
            if task.items is None or not any(isinstance(item, Local) for item in task.items):
                raise
            log.repeated += len(task.items)
            lane.send(task._replace(items=None))

    def given_back(self, order: OutputBatch) -> None:
        """The lane has not begun the job: another worker is to do it."""
        if order not in self._pads:
            self.need(order)

    def joined(self, order: OutputBatch, item: Item) -> None:
        """A worker is through with the job."""
        self._pads.pop(order, None)
        self._assembly.joined(order, item)

    def lost(self, chunk: m.Chunk, exit_: Exit, claim: Claim, log: Telemetry) -> bool:
        """A worker died at the job; returns whether another is to try it."""
        order, lane = chunk.order, chunk.lane
        spans, pad = self._assembly.spans(order), self._pads.get(order)
        if pad is None:
            failed = self._deaths.judge_job(exit_, claim, lane, spans, self._assembly)
        else:
            failed = self._deaths.judge_pad(exit_, claim, lane, pad)
        again = failed is None
        if failed is not None and failed.collated:
            self._assembly.joined(order, failed)
        elif failed is not None:
            again = self._assembly.lose(order, failed)
        if not again:
            self._pads.pop(order, None)
        elif pad is None:
            self.need(order)
            self._repeat(order, claim, log)
        return again

    def _repeat(self, order: OutputBatch, claim: Claim, log: Telemetry) -> None:
        """Another worker is to do the job; one that joined what lies ready may have changed it in place."""
        if claim.stage == JOINING and not claim.started:
            self._anew.add(order)
            log.repeated += m.count(self._spans[order])
        else:
            log.repeated += claim.started
