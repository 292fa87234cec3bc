"""Where a loader stands: from a running epoch to a state.

A ``EpochProgress`` is made with every epoch's iterator, and asked by ``DataLoader.state_dict``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from minato_gpu.checkpoint import process_generators, ranks
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.streams import MOST_READ_AGAIN, between, check_read_again, plain_streams
from minato_gpu.lanes.streams import StreamState, is_stateful
from minato_gpu.packing import packed, packed_state, packed_states
from minato_gpu.samples import Ticket, witness_of
from minato_gpu.sampling.delivered import HISTORY, DeliveredPositions
from minato_gpu.sampling.occurrences import Occurrences
from minato_gpu.sampling.orders import KEYS, REPLAY, Order, SamplerSnapshot
from minato_gpu.sampling.sampler_restore import ENOUGH
from minato_gpu.sampling.samplers import Sampling, length_of
from minato_gpu.sampling.sources import Mark, Source
from minato_gpu.snapshots import Snapshot


def generators_of(loader: Any, sampling: Sampling) -> dict[str, torch.Generator]:
    """The generators that a loader's epochs are drawn from, by their role."""
    found: dict[str, torch.Generator] = {}
    if loader.generator is not None:
        found["loader"] = loader.generator
    if sampling.generator is not None and sampling.generator is not loader.generator:
        found["sampler"] = sampling.generator
    if sampling.replays and sampling.uses_default_generator:
        found["default"] = torch.default_generator
    return found


class EpochProgress:
    """One epoch of a loader, since it began. ``seeds``: its own base seed, and that of the workers with the epoch in
    which they started. ``globals_at_start``: how the process's generators stood then, for a stream that draws here."""

    def __init__(
        self,
        loader: Any,
        number: int,
        seeds: tuple[int, int, int],
        worlds: list[Any] | None = None,
    ) -> None:
        self.number = number
        self.source: Source | None = None
        self.over = False  # the iterator has said so
        self._seeds = seeds
        self._sampling = Sampling(loader)
        self._most_again = most_drawn_again(loader)
        self._worlds = worlds or []
        self._epoch_of_sampler = sampler_epoch(self._sampling)
        self._remaining: _Remaining | None = None
        self.globals_at_start: s.State | None = None
        self._globals = process_generators.concerning(loader, self._sampling)
        self._asked = b""  # torch's global generator before the batch that is asked for
        self._before: deque[bytes] = deque(maxlen=HISTORY)  # and before each of the last that were delivered

    def asked(self) -> None:
        """The next batch is about to be taken, or to be fetched here."""
        if self._globals and (state := process_generators.torch_now()) != self._asked:  # few of them, mostly
            self._asked = state

    def delivered(
        self,
        batch: Sequence[tuple[int, int]],
        survivor: Ticket | None = None,
        failed: int = 0,
        *,
        returned: bool = True,
    ) -> None:
        """The consumer has this batch: its positions, or the ticket of a stream. For the rest see ``Delivered.add``."""
        assert self.source is not None
        with self.source.lock:
            if returned or self.source.streams is not None:
                self._before.append(self._asked)
            if self.source.streams is not None:
                self.source.streams.delivered(batch[0][0])
            else:
                self.source.delivered.add(batch, survivor, failed, returned=returned)

    @property
    def batches(self) -> int:
        """How many of the epoch the consumer has, or had in an earlier run; those that were left out count too."""
        assert self.source is not None
        return self.source.delivered.batches if self.source.streams is None else self.source.streams.batches

    @property
    def streams_at_end(self) -> list[StreamState]:
        """Where the data sets of workers stand for the epoch after this one."""
        assert self.source is not None and self.source.streams is not None
        return self.source.streams.at_end()

    @property
    def ended_with_batches(self) -> bool:
        """Whether the epoch is over, and a stream has yielded any."""
        streams = None if self.source is None else self.source.streams
        return self.over and streams is not None and streams.batches > 0

    def state(self, ahead: int) -> s.State:
        """The state of the epoch, as it was ``ahead`` batches ago, for whichever thread. Raises ValueError where that
        cannot be told."""
        assert self.source is not None
        with self.source.lock:
            return self._state(self.source, ahead)

    def _state(self, source: Source, ahead: int) -> s.State:
        streams = source.streams
        seed, workers_seed, workers_epoch = self._seeds
        out: s.State = {
            "format": s.FORMAT,
            "version": s.VERSION,
            "kind": "map" if streams is None else "iterable",
            "epoch": self.number,
            "begun": True,
            "seed": seed,
            "workers_seed": workers_seed,
            "workers_epoch": workers_epoch,
        }
        if streams is not None:
            out["source"] = {**self._sampling.cutting, **plain_streams(streams, ahead)}
            check_read_again(out["source"], self._sampling.size or 1)
            if self.globals_at_start is not None and out["source"]["streams"][0]["state"] is None:
                out["source"]["global"] = self.globals_at_start
        else:
            delivered = source.delivered.rewound(ahead)
            progress: s.State = {"batches": delivered.batches, "below": delivered.low}
            progress["above"] = packed(delivered.bits())
            if delivered.survivor is not None:
                progress["survivor"] = s.plain_survivor(delivered.survivor)
            if delivered.failed:
                progress["failed"] = delivered.failed
            out.update(progress=progress, source=self._source_state(source, delivered))
        out["generators"] = dict(source.order.generator_states())  # after all keys that are stored have been drawn
        if self._globals:
            before = {process_generators.TORCH: self._before[-ahead]} if ahead else None
            out["global"] = process_generators.plain(before or process_generators.now(self._globals))
        return out

    def _source_state(self, source: Source, delivered: DeliveredPositions) -> s.State:
        out = {**self._sampling.describe(), "way": source.order.way, "set_epoch": self._epoch_of_sampler}
        out["rank"] = ranks.rank_of(self._sampling.inner)
        if source.order.way == REPLAY:
            check_drawn_again(delivered.low, self._most_again)
            for below, crc in reversed(source.digests):
                if 0 < below <= delivered.low:
                    out["digest"] = {"below": below, "crc": crc}
                    break
            return {**out, "witness": source.witness, "worlds": Snapshot(self._worlds).copy()}
        if source.order.way == KEYS:
            self._remaining = self._remaining or _Remaining(source)
        first = bisect_right(source.marks, delivered.low, key=lambda mark: mark.end)
        marks = list(islice(source.marks, first, None))
        place, position = (marks[0].place, marks[0].position) if marks else (source.place, source.position)
        out = {**out, "place": place, "position": position}
        if self._remaining is not None:
            out["nested"] = _told_between(self._sampling, source.order)["nested"]
            return {**out, **self._remaining.since(place, position)}
        return {**out, **self._state_of_sampler(source, marks)}

    def _state_of_sampler(self, source: Source, marks: list[Mark]) -> s.State:
        """The sampler's own state, the first that is known since ``marks`` begin, and the keys drawn before it."""
        order = source.order
        marked = [(mark.state, mark.keys) for mark in marks]
        if not any(own is not None for own, _ in [*marked, *source.coming]):
            order.begin()  # may draw an item
        own, drawn, following = _known_state([*marked, *((own, source.keys_of(item)) for own, item in source.coming)])
        wanted = ENOUGH if order.moved else 0
        if own is None:  # of an epoch's last key a sampler may have the state that it has before the next one's first
            wanted = max(wanted, 1)
        while sum(map(len, following)) < wanted and (foreseen := order.foresee()) is not None:
            own = foreseen[0] if own is None else own
            following.append(source.keys_of(foreseen[1]))
        now = own is None
        if own is None:
            own = order.state()
        if own.error is not None:
            raise ValueError(f"this epoch cannot be saved: {own.error}")
        out: s.State = {
            "state": own.own.copy(),
            "ended": now and (source.ended or order.ended),
            **_plain_counts(source.saved(marks)),
        }
        if drawn:
            out["drawn"] = _plain(drawn)
        generators = {role: packed_state(state) for role, state in own.generators.items()}
        if generators != order.begun_from:
            out["generators"] = generators
            out.update(_plain_following(following, order.digest))
        return out


def _plain_following(following: list[list[Any]], digest: int) -> s.State:
    """What came after a state, so that it can be told again; nothing where that is not known. ``digest``: of the
    generators after all of it."""
    keys: list[Any] = []
    items = 0
    while items < len(following) and len(keys) < ENOUGH:
        keys, items = keys + following[items], items + 1
    witness = witness_of(keys)
    left = {"generators": digest} if items == len(following) else {}
    return {"next": {"items": items, "witness": witness, **left}} if witness and items else {}


def _plain_counts(occurrences: Occurrences) -> s.State:
    """How often each key had come. Raises ValueError for keys that cannot be stored, where that counts."""
    planes, others = occurrences.planes()
    try:
        plain = [[s.plain_key(key), count] for key, count in others.items()]
    except ValueError:
        if occurrences.used:
            raise
        return {"planes": [], "others": [], "counted": False}
    return {"planes": [[ones, packed(plane)] for ones, plane in planes], "others": plain}


def _plain(drawn: list[list[Any]]) -> list[list[Any]]:
    try:
        return [s.plain_keys(keys) for keys in drawn]
    except ValueError as error:
        raise ValueError(
            "this epoch can be saved once its first batch has been delivered: a sampler's own state is known only when "
            f"it has yielded a key, and what came before that must be stored. {error}"
        ) from None


def _known_state(
    coming: list[tuple[SamplerSnapshot | None, list[Any]]],
) -> tuple[SamplerSnapshot | None, list[list[Any]], list[list[Any]]]:
    """The first state that is known before one of these batches, and the keys of those before that and after."""
    keys = [keys for _, keys in coming]
    for at, (own, _) in enumerate(coming):
        if own is not None:
            return own, keys[:at], keys[at:]
    return None, keys, []


class _Remaining:
    """What a sampler of unknown kind still yields, as plain data: drawn and made plain once, then only cut.

    It begins where the first save finds the oldest batch that may be asked for; later ones begin further on.
    """

    def __init__(self, source: Source) -> None:
        first = source.marks[0] if source.marks else source
        marked = [mark.keys for mark in source.marks]
        batches = marked + [source.keys_of(item) for item in source.rest()]
        before = source.occurrences.before([key for keys in marked for key in keys])
        self._place, self._position = first.place, first.position
        self._batches = [s.plain_keys(keys) for keys in batches]
        self._flat = not any(type(key) is list for keys in self._batches for key in keys)
        self._occurrences = before.count([key for keys in batches for key in keys]) or []

    def since(self, place: int, position: int) -> s.State:
        """What comes from this batch on, as the caller's own: nothing that is done to it changes a later state."""
        batches = self._batches[place - self._place :]
        return {
            "batches": [keys.copy() for keys in batches] if self._flat else Snapshot(batches).copy(),
            "occurrences": self._occurrences[position - self._position :],
        }


def most_drawn_again(loader: Any) -> int:
    """So many keys are drawn again: those of a pass over the data set, whatever it takes, and else as many as samples
    of a stream are read again. How many a sampler yields may be a number that nobody could wait for."""
    return max(MOST_READ_AGAIN, length_of(loader.dataset) or 0)


def check_drawn_again(below: int, most: int) -> None:
    """Raises ValueError where a resume draws more keys again than this."""
    if below > most:
        raise ValueError(
            f"state: 'below' tells of {below} samples delivered. Their keys would have to be drawn again, and at most "
            f"{most} are; give the sampler state_dict() and load_state_dict(), which the loader then uses"
        )


def before_epoch(
    loader: Any, number: int, workers: tuple[int, int], last: EpochProgress | None, streams: Sequence[StreamState]
) -> s.State:
    """The state of a loader whose epoch ``number`` has not begun.

    ``workers``: the seed of those that stay, and the epoch in which they started; ``last``: where the epoch before
    stands, if there was one; ``streams``: where the data sets that the epoch iterates stand, where that is known.
    """
    sampling = Sampling(loader)
    generators = {role: g for role, g in generators_of(loader, sampling).items() if role != "default"}
    own = _told_between(sampling, None if last is None or last.source is None else last.source.order)
    drawn_from = process_generators.concerning(loader, sampling)
    outside = {"global": process_generators.plain(process_generators.now(drawn_from))} if drawn_from else {}
    seed, epoch = workers
    return {
        "format": s.FORMAT,
        "version": s.VERSION,
        "kind": "map",
        "epoch": number,
        "begun": False,
        "seed": 0,
        "workers_seed": seed % (1 << 64),
        "workers_epoch": epoch,
        "generators": packed_states(generators),
        "progress": {"batches": 0, "below": 0, "above": ""},
        "source": {
            "state": {"iterator": None, **own},
            "rank": ranks.rank_of(sampling.inner),
            **(between(streams) if sampling.iterable else {}),
        },
        **outside,
    }


def _told_between(sampling: Sampling, order: Order | None) -> s.State:
    """The states of the sampler, and of one nested in it, after ``order``, all of which has been drawn."""
    parts = {"sampler": sampling.inner, "nested": sampling.nested}
    if order is not None and order.untold is not None:
        given = order.untold.copy()
        return {name: given.get(name) for name in parts}
    return {name: Snapshot(part.state_dict()).copy() if is_stateful(part) else None for name, part in parts.items()}


def sampler_epoch(sampling: Sampling) -> int | None:
    """What ``set_epoch`` was last told, where the sampler has it."""
    epoch = getattr(sampling.inner, "epoch", None)
    return epoch if callable(getattr(sampling.inner, "set_epoch", None)) and isinstance(epoch, int) else None


def is_iterable(loader: Any) -> bool:
    """Whether its workers iterate the data set for themselves."""
    return isinstance(loader.dataset, IterableDataset)
