"""Batches that a worker joins (jobs), because their samples cannot be stacked in place."""

from __future__ import annotations

from minato_gpu.engine.deaths import Deaths
from minato_gpu.lanes.base import Item, Piece, StoredSample, Task
from minato_gpu.lanes.contract import Exit, Lane
from minato_gpu.memory.status_board import JOINING
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.samples import OutputBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.spans import TicketSpan, tickets
from minato_gpu.window.assembly import Assembly


class Jobs:
    """The jobs of one run, by the order of their batches."""

    def __init__(self, assembly: Assembly, deaths: Deaths) -> None:
        self._assembly = assembly
        self._deaths = deaths
        self._anew: set[OutputBatch] = set()  # batches of which the job is to prepare every sample
        self._left: set[TicketId] = set()  # samples that jobs are to prepare, and nobody has

    def leave(self, spans: tuple[TicketSpan, ...]) -> None:
        """Leaves these samples to the jobs that join them, to be prepared there."""
        self._left.update(tickets(spans))

    def task(self, chunk: m.Chunk, run: int, seeds: dict[int, int]) -> Task:
        """Returns the task of joining the chunk's batch, without marks."""
        spans, window = self._assembly.spans(chunk.order), self._assembly.window
        stored = None if chunk.order in self._anew else self._stored(spans)
        epoch, piece = window.at(spans[0][0]).epoch, window.described(spans)._replace(stored=stored)
        singly = stored is not None or self._deaths.singly(spans)
        return Task(run, chunk.number, "collate", epoch, seeds[epoch], (piece,), singly=singly)

    def _stored(self, spans: tuple[TicketSpan, ...]) -> list[StoredSample] | None:
        """Returns where each sample is stored; None if none is, or those on a device cannot be copied to the host."""
        try:
            stored = self._assembly.stored(spans)
        except Exception:
            return None
        return stored if any(stored) else None

    @staticmethod
    def send(lane: Lane, task: Task) -> Task:
        """Sends a job to a lane; returns the task as it was sent.

        Samples of a device lane are stored in this process, and may be impossible to send to a worker: the job then
        prepares all samples of its batch. Raises what sending raises if that does not help.
        """
        try:
            lane.send(task)
        except Exception:
            (piece,) = task.pieces
            if piece.stored is None:
                raise
            task = task._replace(pieces=(piece._replace(stored=None),))
            lane.send(task)
        return task

    def joined(self, order: OutputBatch, items: list[Item], prepared: int, log: Telemetry) -> int:
        """Takes in a job that has ended, having ``prepared`` so many of its samples.

        Returns how many samples of the batch nobody had prepared before; the others that it prepared are counted as
        repeated.
        """
        spans = self._assembly.spans(order)
        first = self._left.intersection(tickets(spans)) if self._left else set[TicketId]()
        self._left -= first
        log.repeated += prepared - len(first)
        self._assembly.joined(order, items)
        return len(first)

    def lost(self, chunk: m.Chunk, job: Piece, exit_: Exit, log: Telemetry) -> bool:
        """Handles the death of a worker at the job; returns whether another worker is to try it."""
        order, claim = chunk.order, exit_.claim
        what = chunk.lane, self._assembly.spans(order), 0, len(job.keys)
        verdict = self._deaths.judge(exit_, *what, self._assembly, job=True)
        log.repeated += claim.started if job.stored is None else job.stored[: claim.started].count(None)
        if claim.stage == JOINING:  # what is stored may have been changed in place
            self._anew.add(order)
        failed = verdict.failure
        return failed is None or self._assembly.give_up(order, verdict.settled[0], failed)
