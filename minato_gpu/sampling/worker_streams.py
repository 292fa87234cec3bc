"""Where the streams of an iterable data set stand: one for each worker, which owns it.

A worker says after every batch where its stream stands, if the data set or its iterator can tell (lanes/streams.py).
What counts is what it said with the last *delivered* batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from minato_gpu.lanes.streams import EVERY, StreamStart, StreamState, dataset_part, share_seed
from minato_gpu.sampling.delivered import HISTORY

_NOTHING = StreamState(None, False)
MOST_BYTES = 1 << 27
"""Of states that are kept for consumers that read ahead; of larger ones fewer batches can be taken back."""


class StreamPlace(NamedTuple):
    """How far one stream has been delivered. ``ended``: it will yield nothing more; ``told``: what its worker said."""

    batches: int
    ended: bool
    told: StreamState


class _Worker:
    def __init__(self, batches: int = 0, told: StreamState = _NOTHING) -> None:
        self.batches = batches
        self.told = told


class WorkerStreams:
    """The parent's side: how far each worker's stream has been delivered.

    ``turns``: the worker of each ticket that is not delivered, filled by the pump; ``told``: what came with its batch.
    """

    def __init__(self, workers: int, batches: int = 0, turn: int = 0) -> None:
        self.batches = batches
        self.turns: dict[int, int] = {}
        self.told: dict[int, StreamState] = {}
        self.ended: set[int] = set()  # the workers whose streams are known to be at their end
        self.shared_seed: int | None = None  # the seed of a data pipe's order
        self.left: list[StreamStart] = []  # of streams that had ended when they were saved: where the next epoch begins
        self.turn = turn  # whose turn it is once nothing is under way
        self.on_saves: Callable[[bool], None] = lambda come: None  # told whether states are asked for every few batches
        self._saved = batches  # when one was last asked for, or might have been
        self._workers = [_Worker() for _ in range(workers)]
        self._ends: dict[int, StreamState] = {}  # by worker, what was told at the end of its stream
        self._recent: deque[tuple[int, int, StreamState]] = deque()  # worker, and what it was before
        self._kept = 0  # bytes of states in there

    def delivered(self, ticket: int) -> None:
        """The consumer has the batch of this ticket."""
        number = self.turns.pop(ticket)
        worker = self._workers[number]
        self._remember(number, worker)
        self.batches += 1
        worker.batches += 1
        told = self.told.pop(ticket, _NOTHING)
        worker.told = told._replace(state=worker.told.state) if told.since else told
        self.turn = (number + 1) % len(self._workers)
        if not self.saves_come:
            self.on_saves(False)

    def _remember(self, number: int, worker: _Worker) -> None:
        """Where the worker's stream stood, for who reads ahead."""
        self._recent.append((number, worker.batches, worker.told))
        self._kept += worker.told.nbytes
        while len(self._recent) > HISTORY or (self._kept > MOST_BYTES and len(self._recent) > 1):
            self._kept -= self._recent.popleft()[2].nbytes

    @property
    def saves_come(self) -> bool:
        """Whether a state was asked for some batches ago, or the epoch has just begun."""
        return self.batches - self._saved < EVERY * len(self._workers)

    def exhausted(self, ticket: int, worker: int, told: StreamState | None = None) -> None:
        """The ticket found its worker's stream at its end; the first that does tells the stream's state."""
        if told is not None:
            self._ends[worker] = told
        self.ended.add(worker)
        self.turns.pop(ticket, None)  # last: a state that is made meanwhile then takes the stream to be under way

    def share_seed(self, drawn: int | None, pipe: Any) -> None:
        """``drawn``: what PyTorch's loader has drawn, and set, for this epoch of a data pipe (None: it is none). One
        that goes on has its own."""
        if drawn is None or self.shared_seed is None:
            self.shared_seed = drawn
        else:
            share_seed(pipe, self.shared_seed)

    def begin(self, tolds: list[StreamState]) -> None:
        """No batch has been delivered: the data sets of all workers stand where they say."""
        for worker, told in zip(self._workers, tolds, strict=True):
            worker.told = told

    def at_end(self) -> list[StreamState]:
        """Where the data sets of all workers stand for the next epoch, where they have told it."""
        ends = [self._ends.get(number, _NOTHING) for number in range(len(self._workers))]
        return [
            StreamState(
                state := dataset_part(told.state), False, told.error, over=state is not None and worker.batches > 0
            )
            for told, worker in zip(ends, self._workers, strict=True)
        ]

    def before(self, ahead: int) -> tuple[int, list[StreamPlace]]:
        """Whose turn it was ``ahead`` batches ago, and where every stream stood. To be asked for a state: saves come.

        Raises ValueError for an ``ahead`` that goes too far back.
        """
        if ahead > len(self._recent):
            raise ValueError(
                f"ahead={ahead}: this iterator has delivered {self.batches} batches, and the last {len(self._recent)} "
                "can be taken back"
            )
        self._saved = self.batches
        self.on_saves(True)
        workers = {number: (worker.batches, worker.told) for number, worker in enumerate(self._workers)}
        turns = dict(self.turns)
        turn = turns[min(turns)] if turns else self.turn
        waiting = set(turns.values())
        for number, batches, told in list(self._recent)[::-1][:ahead]:
            workers[number] = (batches, told)
            turn = number
            waiting.add(number)
        done = self.ended - waiting
        places = []
        for number, (batches, told) in workers.items():
            at_end = self._ends.get(number, told) if number in done else told
            places.append(StreamPlace(batches, told.ended or number in done, at_end))
        return turn, places

    def go_on(self, places: list[StreamPlace], starts: list[StreamStart]) -> None:
        """An earlier run came this far, and its streams go on from these starts."""
        for number, (place, start) in enumerate(zip(places, starts, strict=True)):
            self._workers[number] = _Worker(place.batches, place.told)
            if place.ended:
                self.ended.add(number)
                self._ends[number] = place.told
                if (following := start.next_epoch) is not None:
                    self.left.append(following)
