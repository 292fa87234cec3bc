"""The positions of an iterable data set's streams: one for each worker, which owns it.

A worker says after every batch where its stream stands, if the data set or its iterator can tell (lanes/streams.py).
What counts is what it said with the last *delivered* batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minato_gpu.lanes.base import Failure, Item
from minato_gpu.lanes.streams import StreamState, dataset_part, share_seed
from minato_gpu.samples import Value
from minato_gpu.sampling.delivered_positions import HISTORY

_NOTHING = StreamState(None)
MOST_BYTES = 1 << 27
"""Bytes of states that are kept for consumers that read ahead; of larger ones fewer batches can be taken back."""


class WorkerStreams:
    """The position up to which each worker's stream has been delivered, as the training process knows it."""

    def __init__(self, workers: int, batches: int = 0, turn: int = 0) -> None:
        self.batches = batches  # delivered
        self.turns: dict[int, int] = {}  # the worker of each ticket that is not delivered
        self.told: dict[int, StreamState] = {}  # the state that came with a ticket's batch, if any did
        self.ended: set[int] = set()  # the workers whose streams are known to be at their end
        self.shared_seed: int | None = None  # the seed of a data pipe's order
        self.starts: Sequence[StreamState] = ()  # start of each stream, if not at its beginning
        # states of streams that had ended when they were saved: the next epoch begins there
        self.left: list[StreamState] = []
        self.turn = turn  # whose turn it is, or of workers whose streams have ended the next one's
        self._at = [_NOTHING] * workers  # by worker, as of what was delivered
        self._ends: dict[int, StreamState] = {}  # state reported at the end of a worker's stream, by worker
        self._recent: deque[tuple[int, StreamState]] = deque()  # worker, and where its stream stood before
        self._kept = 0  # bytes of states in there

    def size_of(self, ticket: int, whole: int) -> int:
        """Returns the number of samples of this ticket's batch, including one that raised; ``whole`` if its worker has
        not reported it."""
        state = self.told.get(ticket)
        return whole if state is None else max(1, state.size)

    def delivered(self, ticket: int) -> None:
        """Notes that the consumer has this ticket's batch."""
        number = self.turns.pop(ticket)
        before, told = self._at[number], self.told.pop(ticket, _NOTHING)
        self._recent.append((number, before))
        self._kept += before.nbytes
        while len(self._recent) > HISTORY or (self._kept > MOST_BYTES and len(self._recent) > 1):
            self._kept -= self._recent.popleft()[1].nbytes
        self.batches += 1
        state = before.state if told.since else told.state
        error = before.error if told.state is None and not told.since else None  # of a stream that has raised once
        stands = state, told.ended, told.error or error, told.since, told.over, before.batches + 1, told.size
        self._at[number] = StreamState(*stands)  # half of what ``_replace`` takes
        self.turn = (number + 1) % len(self._at)

    def advance(self, ticket: int, worker: int, state: StreamState | None, item: Item) -> None:
        """Notes the outcome of a ticket: a batch, a failure, or None where its worker's stream has ended.

        ``state``: where the stream stands after it; None: not reported. The first ticket that finds its stream ended
        brings the stream's last state.
        """
        if item is not None:
            if state is None and isinstance(item, Failure):  # before there was a stream
                state = _NOTHING
            if state is not None:
                self.told[ticket] = state
            return
        if state is not None:
            self._ends[worker] = state
        self.ended.add(worker)
        self.turns.pop(ticket, None)  # last: a state that is made meanwhile then takes the stream to be under way

    def share_seed(self, drawn: int | None, pipe: Value) -> None:
        """Notes the seed of a data pipe's order, which PyTorch's loader has drawn and set (None: it is no data pipe).

        In an epoch that was resumed with such a seed, sets that one in ``pipe`` instead.
        """
        if drawn is None or self.shared_seed is None:
            self.shared_seed = drawn
        else:
            share_seed(pipe, self.shared_seed)

    def begin(self, places: Sequence[StreamState], starts: Sequence[StreamState] = ()) -> None:
        """Sets where the streams stand: an earlier run has come so far, or the data sets of all workers have reported
        it.

        ``starts`` says where they are to be opened, if not at their beginning.
        """
        self._at, self.starts = list(places), starts
        for number, place in enumerate(places):
            if place.ended:
                self.ended.add(number)
                self._ends[number] = place
                if (following := place.next_epoch) is not None:
                    self.left.append(following)

    def at_end(self) -> list[StreamState]:
        """Returns where each worker's data set stands for the next epoch; its ``state`` is None if it has not reported
        that."""
        ends = [(at.batches, self._ends.get(number, _NOTHING)) for number, at in enumerate(self._at)]
        parts = [(batches, dataset_part(told.state), told.error) for batches, told in ends]
        return [StreamState(part, error=error, over=part is not None and batches > 0) for batches, part, error in parts]

    def before(self, ahead: int) -> tuple[int, list[StreamState]]:
        """Returns whose turn it was ``ahead`` batches ago, and where every stream stood.

        Raises ValueError for an ``ahead`` that goes too far back.
        """
        if ahead > len(self._recent):
            raise ValueError(
                f"ahead={ahead}: this iterator has delivered {self.batches} batches, and the last {len(self._recent)} "
                "can be taken back"
            )
        places = list(self._at)
        turn, waiting = self.turn, set(dict(self.turns).values())
        for number, before in list(self._recent)[::-1][:ahead]:
            places[number] = before
            turn = number
            waiting.add(number)
        for number in self.ended - waiting:
            at = places[number]
            end = self._ends.get(number, at)
            places[number] = end._replace(batches=at.batches, error=end.error or at.error, ended=True)
        return turn, places
