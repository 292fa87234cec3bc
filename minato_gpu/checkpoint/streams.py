"""The streams of an iterable data set as plain data, and back.

Where a data set can tell nothing of its stream, that is read again, and how far is a number in the state: one from an
untrusted file must not make a loader read for ever, so it is bounded, and so is what is saved.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence

from minato_gpu.checkpoint import state as s
from minato_gpu.lanes.snapshots import dumps
from minato_gpu.lanes.streams import ITSELF, StreamState, is_stateful
from minato_gpu.samples import JSON, Value
from minato_gpu.sampling.worker_streams import WorkerStreams
from minato_gpu.util.messages import say_once

MOST_READ_AGAIN = 1 << 28
"""Most samples of a stream without a state of its own that are read again; one that is further on needs a state."""


def plain_streams(streams: WorkerStreams, ahead: int, samples: int) -> s.State:
    """Returns where the streams stood ``ahead`` batches ago, as plain data (except the data set's own states).

    ``samples``: the batch size. Raises ValueError for an ``ahead`` that goes too far back, if a data set could not
    tell its state, and if it has none and is too far on to be read again.
    """
    turn, places = streams.before(ahead)
    plain = plain_places(places)
    check_read_again(places, samples)
    shared = {} if streams.shared_seed is None else {"shared_seed": streams.shared_seed}
    return {"turn": turn, "streams": plain, **shared}


def plain_places(places: Sequence[StreamState]) -> list[s.State]:
    """Returns the positions of streams as plain data, one dict for each (but for the data set's own state in it).

    Raises ValueError if a data set could not tell its state.
    """
    plain: list[s.State] = []
    for number, at in enumerate(places):
        if at.error is not None:
            raise ValueError(f"the stream of worker {number} cannot be saved: {at.error}")
        own: s.State = at._asdict()
        del own["error"], own["size"]
        if at.state is not None:
            own["state"] = dict(zip(("of", "state", "dataset"), pickle.loads(at.state), strict=True))
        plain.append(own)
    return plain


def _pickled(given: Mapping[str, JSON] | None) -> bytes | None:
    if given is None:
        return None
    with s.within_depth():
        return dumps((given["of"], given.get("state"), given.get("dataset")))


def plain_between(places: Sequence[StreamState]) -> s.State:
    """Returns what a state between two epochs says of streams; {} if no data set has a state."""
    plain = plain_places(places)
    return {"streams": plain} if any(own["state"] is not None for own in plain) else {}


def resumed_streams(saved: Mapping[str, JSON], places: list[StreamState]) -> WorkerStreams:
    """Returns the streams of a checked state, each to go on at its place.

    If the state had another number of streams, the first worker's turn comes first.
    """
    turn = saved["turn"] if len(places) == len(saved["streams"]) else 0
    streams = WorkerStreams(len(places), sum(at.batches for at in places), turn)
    streams.shared_seed = saved.get("shared_seed")
    streams.begin(places, places)
    return streams


def check_streams(saved: Mapping[str, JSON], dataset: Value, workers: int, samples: int) -> list[StreamState]:
    """Returns where the streams of a state stand, for this number of workers; ``samples``: the batch size.

    Raises ValueError if they are damaged, another data set's, of another number of workers among which they cannot be
    shared out, or too far on to be read again.
    """
    places = places_of(saved, dataset)
    s.number(saved, "turn", 0, len(places) - 1)
    places = _for_workers(places, dataset, max(1, workers))
    if saved.get("shared_seed") is not None:
        s.number(saved, "shared_seed")
    check_read_again(places, samples)
    return places


def starts_between(saved: Mapping[str, JSON], dataset: Value, workers: int) -> list[StreamState]:
    """Returns where each worker's stream begins in the epoch after a state between two epochs; empty if the state does
    not say.

    Raises ValueError as ``check_streams`` does.
    """
    places = [] if saved.get("streams") is None else places_of(saved, dataset)
    for at in places:
        s.number({"batches": at.batches}, "batches", largest=0)
    return [at._replace(ended=False) for at in _for_workers(places, dataset, max(1, workers))] if places else []


def _for_workers(places: list[StreamState], dataset: Value, workers: int) -> list[StreamState]:
    return places if len(places) == workers else shared_out(places, dataset, workers, "this loader has {}")


def shared_out(places: list[StreamState], dataset: Value, workers: int, among: str) -> list[StreamState]:
    """Returns the streams of ``workers`` workers (or ranks), among which the data set shares out what these have left.

    ``among``: who they are, for an error, with {} in place of their number. Raises ValueError if the data set does not
    share out, or cannot from these states.
    """
    going = [at for at in places if not at.ended] or places
    if why := _why_not_shared_out(going, dataset):
        raise ValueError(f"the state has the streams of {len(places)} workers, {among.format(workers)}: {why}")
    if not any(at.state for at in going):
        return [StreamState(None)] * workers
    own = [pickle.loads(at.state)[1] for at in going if at.state is not None]
    split = dataset.split_states(own, workers)
    name = type(dataset).__name__
    if not isinstance(split, list | tuple) or len(split) != workers:
        raise ValueError(f"{name}.split_states() must return a list of {workers} states, got {s.quoted(split)}")
    try:
        dumped = [dumps(("dataset", state, None)) for state in split]
    except Exception as error:
        raise ValueError(f"{name}.split_states() must return plain states: {error}") from error
    ended, over = all(at.ended for at in going), all(at.over for at in going)
    batches, rest = divmod(sum(at.batches for at in places), workers)
    return [
        StreamState(state, ended, over=over, batches=batches + (number < rest)) for number, state in enumerate(dumped)
    ]


def _why_not_shared_out(going: Sequence[StreamState], dataset: Value) -> str | None:
    """Returns why the data set cannot share out what these streams have left; None if it can."""
    if not (is_stateful(dataset) and callable(getattr(dataset, "split_states", None))):
        return (
            "an iterable data set is shared out among its workers, so their number must stay the same. It may differ "
            "for a minato_gpu.ShardedDataset, and for a data set that has state_dict(), load_state_dict() and "
            "split_states() (see minato_gpu.SplitsStates)"
        )
    kinds = {None if at.state is None else pickle.loads(at.state)[0] for at in going}
    if None in kinds and (len(kinds) > 1 or any(at.batches for at in going)):
        return "a worker had delivered nothing yet, so its share is in no state. Save when each has delivered a batch"
    if not kinds <= {"dataset", None}:
        return "the states are those of iterators, and split_states() takes the data set's; let __iter__ be a generator"
    if any(at.since for at in going):
        return (
            "with snapshot_every_n_steps a stream's state is one of some batches ago, and cannot be split between. "
            "Leave the argument out, or resume with as many workers"
        )
    return None


def places_of(saved: Mapping[str, JSON], dataset: Value) -> list[StreamState]:
    """Returns the streams of a state, checked. Raises ValueError if they are damaged, or another data set's."""
    if not (streams := s.sequence(saved, "streams")):
        raise ValueError("state: 'streams' is empty")
    for own in streams:
        if not isinstance(own, Mapping):
            raise ValueError(f"state: 'streams' must hold dicts, got {s.quoted(own)}")
        s.number(own, "batches")
        for name in ("ended", "over"):
            s.choice(own, name, (True, False))
        s.number(own, "since", largest=own["batches"])
        if own.get("state") is not None:
            _check_owner(s.mapping(own, "state"), dataset)
    return [_place(own) for own in streams]


def _place(own: Mapping[str, JSON]) -> StreamState:
    over = own["batches"] > 0 if own["ended"] else own["over"]
    return StreamState(_pickled(own.get("state")), own["ended"], None, own["since"], over, own["batches"])


def _check_owner(given: Mapping[str, JSON], dataset: Value) -> None:
    """Raises ValueError where the data set does not take such a state."""
    s.choice(given, "of", ("iterator", "dataset", ITSELF))
    name = type(dataset).__name__
    if given["of"] == ITSELF and not isinstance(dataset, Iterator):
        raise ValueError(f"the state is of a data set that is its own iterator, and {name} is none")
    if (given["of"] == "dataset" or given.get("dataset") is not None) and not is_stateful(dataset):
        raise ValueError(f"the state holds one of the data set, but {name} takes none")


def check_read_again(places: Sequence[StreamState], samples: int) -> None:
    """Raises ValueError if too many samples of a stream would be read again and dropped."""
    most = max((samples * at.again for at in places), default=0)
    if most > MOST_READ_AGAIN:
        raise ValueError(
            f"state: 'batches' tells of a stream of which {most} samples were delivered. Its data set has no state of "
            f"its own, so they would have to be read again, and at most {MOST_READ_AGAIN} are; give the data set, or "
            "its iterator, state_dict() and load_state_dict(), which the loader then uses"
        )


def warn_of_draws(places: Sequence[StreamState]) -> None:
    """Logs once, if a stream without a state is to be read again, that what it draws from global generators differs."""
    if any(at.again and at.state is None for at in places):
        say_once(
            "An iterable data set without a state of its own is read again, and what it draws from global generators "
            "in worker threads, or in workers that persist after their first epoch, is not what it drew. If that "
            "chooses its samples (a shuffle buffer), some are lost now and others come twice. Give the data set, or "
            "its iterator, state_dict() and load_state_dict(), or a generator of its own"
        )
