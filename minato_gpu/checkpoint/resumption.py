"""From a state to an epoch that goes on where another left off."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from minato_gpu.checkpoint import checks, process_generators, ranks
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.progress import (
    EpochProgress,
    check_drawn_again,
    generators_of,
    is_iterable,
    most_drawn_again,
    sampler_epoch,
)
from minato_gpu.checkpoint.streams import check_streams, resumed_streams, starts_between, tell_read_again
from minato_gpu.lanes.streams import StreamState, load_dataset
from minato_gpu.sampling import sampler_restore as ways
from minato_gpu.sampling.delivered import DeliveredPositions
from minato_gpu.sampling.occurrences import Plane
from minato_gpu.sampling.orders import KEYS, REPLAY, STATE, Order
from minato_gpu.sampling.sampler_restore import ENOUGH, Following
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.sampling.sources import Source, fresh_source, occurrences_of
from minato_gpu.sampling.worker_streams import WorkerStreams
from minato_gpu.snapshots import Snapshot

_CUTTING = {"batch_size": "batch_size", "drop_last": "drop_last"}
_MOST_PLANES = 255  # indices that come more often are counted in 'others'
_AGREE = {"sampler": "sampler", **_CUTTING}
_LENGTH = {"length": "length of the sampler"}


def begin_source(
    loader: Any,
    number: int,
    seed: int,
    batches: Any,
    resumption: Resumption | None,
    workers: tuple[int, int] | None = None,
) -> tuple[Source, EpochProgress]:
    """An epoch's batches, from its beginning or from where a state says. ``seed``: its base seed where it begins;
    ``batches``: the loader's batch sampler's iterator; ``workers``: seed and first epoch of workers that persist."""
    sampling = Sampling(loader)
    if resumption is not None and resumption.begun:
        resumption.set_generators(loader)
        source = resumption.source(loader, generators_of(loader, sampling))
        worlds = resumption.worlds
    else:
        generators, iterable = generators_of(loader, sampling), is_iterable(loader)
        if iterable:
            order = Order(batches, generators=generators)
        else:
            order = ways.fresh_order(sampling, batches, generators)
        source, worlds = fresh_source(loader, number, seed, order), []
        source.streams = WorkerStreams(max(1, loader.num_workers)) if iterable else None
        if source.streams is not None and resumption is not None and resumption.starts:
            source.streams.begin(resumption.starts, resumption.starts)
    standing = EpochProgress(loader, number, (source.seed, *(workers or (source.seed, number))), worlds)
    standing.source = source
    if resumption is not None and resumption.begun:
        standing.globals_at_start = resumption.state["source"].get("global")
    return source, standing


def expected_of(loader: Any, source: Source, resumption: Resumption | None) -> int | None:
    """Samples of the epoch, or of what an earlier run has left of it, where the sampler tells."""
    expected = Sampling(loader).expected
    if resumption is None or not resumption.begun or expected is None:
        return expected
    return None if resumption.worlds else max(0, expected - source.delivered.samples)


class Resumption:
    """A checked state, on its way to the next iterator; a copy, which nobody changes."""

    @s.within_depth()
    def __init__(self, loader: Any, state: Any) -> None:
        self._sampling = Sampling(loader)
        self._persistent = loader.persistent_workers and loader.num_workers > 0
        if isinstance(state, Mapping):
            self._given = Snapshot(dict(state))
            state = self._given.copy()
        self.state = ranks.for_rank(s.check(state), self._sampling)
        self.number: int = self.state["epoch"]
        self.begun: bool = self.state["begun"]
        self._between = not self.begun  # the state is one of a loader between two epochs
        self._stored: list[list[Any]] = []
        self._counted: tuple[list[Plane], dict[Any, int]] = ([], {})
        self.worlds: list[Any] = []  # how the epoch was shared out among ranks before, if it was merged
        self._epoch_of_sampler = self._check(loader) if self.begun else None
        self.starts: list[StreamState] = []  # of an iterable data set's streams, after a state between two epochs
        if not self.begun and is_iterable(loader):
            self.starts = starts_between(self.state["source"], loader.dataset, loader.num_workers)
        parts = (self.state, self.state["source"])
        found = [{} if part.get("global") is None else s.mapping(part, "global") for part in parts]
        self.globals = process_generators.Waiting(loader, self._sampling, *found)
        if self._epoch_of_sampler is not None:
            self._sampling.inner.set_epoch(self._epoch_of_sampler)

    def _check(self, loader: Any) -> int | None:
        """Whether the state fits this loader; returns the epoch that its sampler had been told of, if it has one."""
        checks.match_kind(loader, self.state)
        if self.state["kind"] == "iterable":
            self._agree(_CUTTING)
            check_streams(self.state["source"], loader.dataset, loader.num_workers, loader.batch_size or 1)
            return None
        drawn_again = self.state["source"].get("way") == REPLAY
        self._agree({**_AGREE, **(_LENGTH if drawn_again else {})})  # any other may not hold to its length, or vary it
        return self._check_source(loader)

    def _agree(self, names: Mapping[str, str]) -> None:
        source, mine = self.state["source"], {**self._sampling.describe(), **self._sampling.cutting}
        for name, meaning in names.items():
            if source.get(name) != mine[name]:
                theirs = s.quoted(source.get(name))
                raise ValueError(f"the state was saved with {meaning} {theirs}, this loader has {s.quoted(mine[name])}")

    def _check_source(self, loader: Any) -> int | None:
        source = self.state["source"]
        s.choice(source, "way", (STATE, REPLAY, KEYS))
        if source["way"] == REPLAY and not self._sampling.replays:
            raise ValueError("the state says that the order can be drawn again, but this sampler gives no such promise")
        progress = self.state["progress"]
        self.delivered = DeliveredPositions.of_bits(
            progress["batches"], progress["below"], s.unpacked(progress, "above")
        )
        self.delivered.survivor = s.survivor_of(progress, self.number)
        self.delivered.failed = s.failed_of(progress)
        checks.match_progress(loader, self.delivered, self._sampling, source)
        if source["way"] == REPLAY:
            check_drawn_again(self.delivered.low, most_drawn_again(loader))
            self.worlds = ranks.checked_worlds(source, self._sampling)
        else:
            checks.match_place(source, self.delivered, self._sampling.size)
        size = self._sampling.size if self._sampling.batched else 1
        if source["way"] == KEYS:
            self._stored = checks.stored_batches(source, "batches")
            checks.match_stored(source, self.delivered, self._stored)
            checks.match_size(self._stored, size, short=not self._sampling.drop_last)
            self._counted = ([], _stored_counts(source, self._stored))
        elif source["way"] == STATE:
            s.mapping(source, "state")
            s.choice(source, "ended", (True, False))
            if source.get("generators") is not None:
                s.generators(s.mapping(source, "generators"))
            _following(source)
            self._stored = [] if source.get("drawn") is None else checks.stored_batches(source, "drawn")
            checks.match_size(self._stored, size, short=source["ended"] and not self._sampling.drop_last)
            self._counted = _counts(source)
        told = source.get("set_epoch") is not None and sampler_epoch(self._sampling) is not None
        return s.number(source, "set_epoch") if told else None

    @property
    def given(self) -> s.State:
        """A copy of the state."""
        out: s.State = self._given.copy()
        return out

    @property
    def moved_on(self) -> bool:
        """Whether ``set_epoch`` has told the sampler of another epoch since: then that one begins, at its start."""
        told = self.begun and self._epoch_of_sampler is not None
        return told and sampler_epoch(self._sampling) != self._epoch_of_sampler

    def move_on(self) -> None:
        """Begin the epoch after that of the state, as if that had ended; say that what it had left is given up."""
        warnings.warn(
            f"load_state_dict() was given a state in the middle of the sampler's epoch {self._epoch_of_sampler}, and "
            f"set_epoch({sampler_epoch(self._sampling)}) has been called since: that epoch begins at its start, and "
            "what was left of the other is not delivered.",
            stacklevel=4,
        )
        self.begun, self.number = False, self.number + 1

    @property
    def knows_seed(self) -> bool:
        """Whether the base seed of the epoch, or of the workers that go on, need not be drawn."""
        return self.begun or (self._persistent and self.number != self.state["workers_epoch"])

    @property
    def seeds(self) -> tuple[int, int, int]:
        """The epoch's base seed, the workers' and the epoch in which those started."""
        return self.state["seed"], self.state["workers_seed"], self.state["workers_epoch"]

    def order_states(self) -> dict[str, torch.Tensor]:
        """The generators' states just before the epoch's order was drawn, by role."""
        return s.generators(self.state["generators"])

    def set_generators(self, loader: Any) -> None:
        """Put the generators that belong to loader and sampler to where they were."""
        states = self.order_states()
        for role, generator in generators_of(loader, self._sampling).items():
            if role != "default" and role in states:
                generator.set_state(states[role])

    def load_sampler(self, loader: Any) -> None:
        """Give a stateful sampler the state that it had between two epochs."""
        if not self._between:
            return
        with s.within_depth():
            saved = s.mapping(self.state["source"], "state")
            own = Snapshot({"sampler": saved.get("sampler"), "iterator": None, "nested": saved.get("nested")})
        ways.load_ended(self._sampling, own, generators_of(loader, self._sampling), self.order_states())

    def load_dataset(self, loader: Any) -> bytes | None:
        """Give an iterable data set in this process the state that it had between two epochs; workers get theirs.

        Returns what it told before (b"": nothing) if that state is one of an epoch's end.
        """
        (start,) = self.starts
        before = load_dataset(loader.dataset, start.state) or b""
        return before if start.over else None

    def source(self, loader: Any, generators: Mapping[str, torch.Generator]) -> Source:
        """The rest of the epoch. Raises ValueError where the loader's sampler yields another order."""
        saved, occurrences, batched = self.state["source"], occurrences_of(loader), self._sampling.batched
        if self.state["kind"] == "iterable":
            none = Order(iter(()), generators=generators)
            source = Source(self.number, self.state["seed"], none, batched=batched, occurrences=occurrences)
            tell_read_again(saved, self._sampling.size or 1)
            source.streams = resumed_streams(saved)
            return source
        if saved["way"] == REPLAY:
            order = self._replayed()
        elif saved["way"] == STATE:
            order = self._from_state(saved, occurrences, generators, batched=batched)
            for item in reversed(self._items(batched)):
                order.put_back(item)
        else:
            occurrences.restore([], self._counted[1])
            order = Order(iter(self._items(batched)), KEYS, generators=generators)
            if saved.get("nested") is not None:  # all of the epoch's has been drawn from it
                nested = Snapshot({"nested": saved["nested"]})
                order.untold = ways.load_ended(self._sampling, nested, generators, self.order_states())
        replays = saved["way"] == REPLAY
        source = Source(
            self.number,
            self.state["seed"],
            order,
            batched=batched,
            occurrences=occurrences,
            place=0 if replays else saved["place"],
            position=0 if replays else saved["position"],
            delivered=self.delivered,
            multiple=self._sampling.multiple,
            digests=replays and self._sampling.draws_on,
            whole=self._sampling.size is None,
        )
        if saved.get("digest") is not None:
            digest = s.mapping(saved, "digest")
            source.expected = s.number(digest, "below"), s.number(digest, "crc")
        source.ended = saved["way"] == STATE and saved["ended"]
        source.skip()
        if source.witness is not None and saved.get("witness") is not None and source.witness != saved["witness"]:
            raise ValueError(
                "the sampler yields another order than when the state was saved; data set, sampler and its seed must "
                "be the same"
            )
        return source

    def _items(self, batched: bool) -> list[Any]:
        """The stored keys as the sampler yielded them."""
        return list(self._stored) if batched else [key for keys in self._stored for key in keys]

    def _replayed(self) -> Order:
        begun_from = dict(self.state["generators"])
        if self.worlds:
            keys = ranks.dealt(self._sampling.inner, self.worlds)
            return Order(self._sampling.cut(keys), begun_from=begun_from)
        default = self.order_states().get("default") if self._sampling.uses_default_generator else None
        return ways.replayed_order(self._sampling, default, begun_from)

    def _from_state(
        self, saved: Mapping[str, Any], occurrences: Any, generators: Mapping[str, torch.Generator], *, batched: bool
    ) -> Order:
        if occurrences.used and saved.get("counted") is False:
            raise ValueError(
                "the state was saved without workers and holds no count of the keys that have come, which cannot be "
                "stored; a loader with workers or a pipeline needs that: pass num_workers=0"
            )
        planes, others = self._counted
        occurrences.restore(planes, others)
        with s.within_depth():
            own = Snapshot({name: saved["state"].get(name) for name in ("sampler", "iterator", "nested")})
        taken = {} if saved.get("generators") is None else s.generators(saved["generators"])
        more: dict[str, Any] = {"ended": saved["ended"], "following": _following(saved), "batched": batched}
        return ways.order_from_state(self._sampling, own, generators, taken, **more)


def _following(saved: Mapping[str, Any]) -> Following | None:
    """What came after the sampler's own state, where it says so."""
    if saved.get("next") is None:
        return None
    plain = s.mapping(saved, "next")
    left = None if plain.get("generators") is None else s.number(plain, "generators")
    return Following(s.number(plain, "items", 1, ENOUGH), s.number(plain, "witness", 1), left)


def _counts(saved: Mapping[str, Any]) -> tuple[list[Plane], dict[Any, int]]:
    """How often each key had come before, from a state with the sampler's own."""
    others: dict[Any, int] = {}
    for pair in s.sequence(saved, "others"):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(f"state: 'others' must hold pairs of a key and a count, got {s.quoted(pair)}")
        others[_name_of(s.key_of(pair[0]))] = s.number({"count": pair[1]}, "count")
    if len(planes := s.sequence(saved, "planes")) > _MOST_PLANES:
        raise ValueError(f"state: 'planes' has {len(planes)} entries, {_MOST_PLANES} at most")
    return [_plane(plane) for plane in planes], others


def _plane(plane: Any) -> Plane:
    if isinstance(plane, str):  # as earlier versions wrote it
        return 0, s.unpacked({"planes": plane}, "planes")
    if not isinstance(plane, (list, tuple)) or len(plane) != 2:
        raise ValueError(f"state: 'planes' must hold pairs of a number and bits, got {s.quoted(plane)}")
    return s.number({"planes": plane[0]}, "planes"), s.unpacked({"planes": plane[1]}, "planes")


def _stored_counts(saved: Mapping[str, Any], stored: list[list[Any]]) -> dict[Any, int]:
    """The same from a state with the remaining keys: the first of each that remains says how many came before."""
    keys, counts = [key for batch in stored for key in batch], s.sequence(saved, "occurrences")
    if counts and len(counts) != len(keys):
        raise ValueError(f"state: {len(counts)} occurrences for {len(keys)} keys")
    before: dict[Any, int] = {}
    for key, count in zip(keys, counts, strict=False):
        before.setdefault(_name_of(key), s.number({"occurrences": count}, "occurrences"))
    return {key: count for key, count in before.items() if count}


def _name_of(key: Any) -> Any:
    """What counts as the same key: keys that cannot be hashed go by what they look like."""
    try:
        hash(key)
    except TypeError:
        return repr(key)
    return key
