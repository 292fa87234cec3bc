"""Where the streams of an iterable data set stand: one for each worker, which owns it.

A worker says after every batch where its stream stands, if the data set or its iterator can tell (lanes/streams.py).
What counts is what it said with the last *delivered* batch. Where it can tell nothing, the stream is read again, and
how far is a number in the state: one from an untrusted file must not make a loader read for ever, so it is bounded, and
so is what is saved.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from minato_gpu.lanes.streams import EVERY, StreamStart, Told
from minato_gpu.notices import LOGGER
from minato_gpu.resume import state as s
from minato_gpu.resume.delivered import HISTORY
from minato_gpu.snapshots import dumps

_NOTHING = Told(None, False)
MOST_READ_AGAIN = 1 << 28
"""So many samples of a stream without a state of its own are read again; one that is further on needs such a state."""
MOST_BYTES = 1 << 27
"""Of states that are kept for consumers that read ahead; of larger ones fewer batches can be taken back."""
_MANY = 1 << 20  # a wait that should be explained


class _Worker:
    def __init__(self, batches: int = 0, told: Told = _NOTHING) -> None:
        self.batches = batches
        self.told = told


class Streams:
    """The parent's side: how far each worker's stream has been delivered.

    ``turns``: the worker of each ticket that is not delivered, filled by the pump; ``told``: what came with its batch.
    """

    def __init__(self, workers: int, batches: int = 0, turn: int = 0) -> None:
        self.batches = batches
        self.turns: dict[int, int] = {}
        self.told: dict[int, Told] = {}
        self.ended: set[int] = set()  # the workers whose streams are known to be at their end
        self.turn = turn  # whose turn it is once nothing is under way
        self.on_saves: Callable[[bool], None] = lambda come: None  # told whether states are asked for every few batches
        self._saved = batches  # when one was last asked for, or might have been
        self._workers = [_Worker() for _ in range(workers)]
        self._recent: deque[tuple[int, int, Told]] = deque()  # worker, and what it was before
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

    def exhausted(self, ticket: int, worker: int) -> None:
        """The ticket found its worker's stream at its end."""
        self.turns.pop(ticket, None)
        self.ended.add(worker)

    def state(self, ahead: int) -> s.State:
        """Plain data but for the data set's own states.

        Raises ValueError for an ``ahead`` that goes too far back, and where a data set could not tell its state.
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
        ended = {number for number, (_, told) in workers.items() if told.ended} | (self.ended - waiting)
        streams = []
        for number, (batches, told) in workers.items():
            if told.error is not None:
                raise ValueError(f"the stream of worker {number} cannot be saved: {told.error}")
            own = None if told.state is None else pickle.loads(told.state)
            state = None if own is None else {"of": own[0], "state": own[1]}
            since = {"since": told.since} if told.since else {}
            streams.append({"batches": batches, "ended": number in ended, "state": state, **since})
        return {"batches": self.batches - ahead, "turn": turn, "streams": streams}

    @classmethod
    def resumed(cls, saved: Mapping[str, Any], workers: int) -> tuple[Streams, list[StreamStart]]:
        """The streams that a checked state tells of, and where each is to start."""
        streams = cls(workers, saved["batches"], saved["turn"])
        starts = []
        for number, own in enumerate(saved["streams"]):
            given = own.get("state")
            with s.within_depth():
                state = None if given is None else dumps((given["of"], given.get("state")))
            since = _since(own)
            starts.append(StreamStart(own["batches"], state, since))
            streams._workers[number] = _Worker(own["batches"], Told(state, own["ended"], since=since))
            if own["ended"]:
                streams.ended.add(number)
        return streams, starts


def _since(own: Mapping[str, Any]) -> Any:
    """Batches since the data set told its state; most states say nothing of it."""
    return own.get("since") or 0


def check_streams(saved: Mapping[str, Any], workers: int, samples: int) -> None:
    """Raises ValueError where a state's streams are damaged, those of another number of workers, or too far on to be
    read again. ``samples``: of a batch."""
    streams = s.sequence(saved, "streams")
    if len(streams) != max(1, workers):
        raise ValueError(
            f"the state has the streams of {len(streams)} workers, this loader has {max(1, workers)}: an iterable data "
            "set is shared out among its workers, so their number must stay the same"
        )
    total = 0
    for own in streams:
        if not isinstance(own, Mapping):
            raise ValueError(f"state: 'streams' must hold dicts, got {s.quoted(own)}")
        total += s.number(own, "batches")
        s.choice(own, "ended", (True, False))
        if own.get("state") is not None:
            s.choice(s.mapping(own, "state"), "of", ("iterator", "dataset"))
        if _since(own):
            s.number(own, "since", largest=own["batches"])
    if s.number(saved, "batches") != total:
        raise ValueError(f"state: {saved['batches']} batches are not the {total} of all streams together")
    s.number(saved, "turn", 0, len(streams) - 1)
    check_read_again(saved, samples)


def check_read_again(saved: Mapping[str, Any], samples: int) -> int:
    """How many samples will be read again and dropped, of all streams. Raises ValueError for too many of one."""
    counts = [samples * (own["batches"] if own.get("state") is None else _since(own)) for own in saved["streams"]]
    most = max(counts, default=0)
    if most > MOST_READ_AGAIN:
        raise ValueError(
            f"state: 'batches' tells of a stream of which {most} samples were delivered. Its data set has no state of "
            f"its own, so they would have to be read again, and at most {MOST_READ_AGAIN} are; give the data set, or "
            "its iterator, state_dict() and load_state_dict(), which the loader then uses"
        )
    return sum(counts)


def tell_read_again(saved: Mapping[str, Any], samples: int) -> None:
    """Say why the first batch will take its time."""
    count = check_read_again(saved, samples)
    if count >= _MANY:
        LOGGER.warning(
            "%d samples of the data set are read again and dropped before the first batch, as 'batches' of the state "
            "says; leaving the loop, or closing the loader, breaks that off",
            count,
        )
