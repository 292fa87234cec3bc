"""Where the streams of an iterable data set stand: one for each worker, which owns it.

A worker says after every batch where its stream stands, if the data set or its iterator can tell (lanes/streams.py).
What counts is what it said with the last *delivered* batch. Where it can tell nothing, the stream is read again, and
how far is a number in the state: one from an untrusted file must not make a loader read for ever, so it is bounded, and
so is what is saved.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from minato_gpu.lanes.streams import EVERY, ITSELF, StreamStart, Told, dataset_part, is_stateful, share_seed
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
        self.shared_seed: int | None = None  # the seed of a data pipe's order
        self.left: list[StreamStart] = []  # of streams that had ended when they were saved: where the next epoch begins
        self.turn = turn  # whose turn it is once nothing is under way
        self.on_saves: Callable[[bool], None] = lambda come: None  # told whether states are asked for every few batches
        self._saved = batches  # when one was last asked for, or might have been
        self._workers = [_Worker() for _ in range(workers)]
        self._ends: dict[int, Told] = {}  # by worker, what was told at the end of its stream
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

    def exhausted(self, ticket: int, worker: int, told: Told | None = None) -> None:
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

    def begin(self, tolds: list[Told]) -> None:
        """No batch has been delivered: the data sets of all workers stand where they say."""
        for worker, told in zip(self._workers, tolds, strict=True):
            worker.told = told

    def at_end(self) -> list[Told]:
        """Where the data sets of all workers stand for the next epoch, where they have told it."""
        ends = [self._ends.get(number, _NOTHING) for number in range(len(self._workers))]
        return [
            Told(state := dataset_part(told.state), False, told.error, over=state is not None and worker.batches > 0)
            for told, worker in zip(ends, self._workers, strict=True)
        ]

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
        done = self.ended - waiting
        ended = {number for number, (_, told) in workers.items() if told.ended} | done
        streams = []
        for number, (batches, told) in workers.items():
            told = self._ends.get(number, told) if number in done else told
            streams.append({"batches": batches, "ended": number in ended, **_plain(number, told)})
        shared = {} if self.shared_seed is None else {"shared_seed": self.shared_seed}
        return {"batches": self.batches - ahead, "turn": turn, "streams": streams, **shared}

    @classmethod
    def resumed(cls, saved: Mapping[str, Any], workers: int) -> tuple[Streams, list[StreamStart]]:
        """The streams that a checked state tells of, and where each is to start."""
        streams = cls(workers, saved["batches"], saved["turn"])
        streams.shared_seed = saved.get("shared_seed")
        starts = []
        for number, own in enumerate(saved["streams"]):
            since = _since(own)
            over = own["batches"] > 0 if own["ended"] else bool(own.get("over"))
            told = Told(_pickled(own.get("state")), own["ended"], since=since, over=over)
            starts.append(StreamStart(own["batches"], told.state, since, over))
            streams._workers[number] = _Worker(own["batches"], told)
            if own["ended"]:
                streams.ended.add(number)
                streams._ends[number] = told
                if (following := starts[-1].next_epoch) is not None:
                    streams.left.append(following)
        return streams, starts


def _plain(number: int, told: Told) -> s.State:
    """What a state says of a stream besides its batches. Raises ValueError where the data set could not tell."""
    if told.error is not None:
        raise ValueError(f"the stream of worker {number} cannot be saved: {told.error}")
    state = None
    if told.state is not None:
        kind, own, dataset = pickle.loads(told.state)
        state = {"of": kind, "state": own, **({} if dataset is None else {"dataset": dataset})}
    return {"state": state, **({"since": told.since} if told.since else {}), **({"over": True} if told.over else {})}


def _pickled(given: Mapping[str, Any] | None) -> bytes | None:
    if given is None:
        return None
    with s.within_depth():
        return dumps((given["of"], given.get("state"), given.get("dataset")))


def between(tolds: list[Told]) -> s.State:
    """What the state of a loader between two epochs says of its streams: nothing where no data set has a state."""
    plain = [{"batches": 0, "ended": False, **_plain(number, told)} for number, told in enumerate(tolds)]
    return {"streams": plain} if any(own["state"] is not None for own in plain) else {}


def starts_between(source: Mapping[str, Any], dataset: Any, workers: int) -> list[StreamStart]:
    """Where the epoch after such a state begins; empty where it says nothing. Raises ValueError where it is damaged, or
    one of another number of workers."""
    if source.get("streams") is None:
        return []
    for own in _checked(source, dataset, workers):
        s.number(own, "batches", largest=0)
    return [StreamStart(0, _pickled(own.get("state")), over=own.get("over") is True) for own in source["streams"]]


def _since(own: Mapping[str, Any]) -> Any:
    """Batches since the data set told its state; most states say nothing of it."""
    return own.get("since") or 0


def check_streams(saved: Mapping[str, Any], dataset: Any, workers: int, samples: int) -> None:
    """Raises ValueError where a state's streams are damaged, those of another data set or number of workers, or too far
    on to be read again. ``samples``: of a batch."""
    streams = _checked(saved, dataset, workers)
    total = sum(own["batches"] for own in streams)
    if s.number(saved, "batches") != total:
        raise ValueError(f"state: {saved['batches']} batches are not the {total} of all streams together")
    s.number(saved, "turn", 0, len(streams) - 1)
    if saved.get("shared_seed") is not None:
        s.number(saved, "shared_seed")
    check_read_again(saved, samples)


def _checked(saved: Mapping[str, Any], dataset: Any, workers: int) -> list[Any]:
    streams = s.sequence(saved, "streams")
    if len(streams) != max(1, workers):
        raise ValueError(
            f"the state has the streams of {len(streams)} workers, this loader has {max(1, workers)}: an iterable data "
            "set is shared out among its workers, so their number must stay the same"
        )
    for own in streams:
        if not isinstance(own, Mapping):
            raise ValueError(f"state: 'streams' must hold dicts, got {s.quoted(own)}")
        s.number(own, "batches")
        s.choice(own, "ended", (True, False))
        if own.get("state") is not None:
            given = s.mapping(own, "state")
            s.choice(given, "of", ("iterator", "dataset", ITSELF))
            name = type(dataset).__name__
            if given["of"] == ITSELF and not isinstance(dataset, Iterator):
                raise ValueError(f"the state is of a data set that is its own iterator, and {name} is none")
            if (given["of"] == "dataset" or given.get("dataset") is not None) and not is_stateful(dataset):
                raise ValueError(f"the state holds one of the data set, but {name} takes none")
        if own.get("over") is not None:
            s.choice(own, "over", (True, False))
        if _since(own):
            s.number(own, "since", largest=own["batches"])
    return streams


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
