"""From a state to an epoch that goes on where another left off."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint import checks, process_generators, ranks
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.positions import positions_of
from minato_gpu.checkpoint.progress import EpochProgress, check_drawn_again, most_drawn_again
from minato_gpu.checkpoint.streams import check_streams, resumed_streams, starts_between, tell_read_again
from minato_gpu.lanes.streams import StreamState
from minato_gpu.samples import JSON, Key, Value
from minato_gpu.sampling import sampler_restore as ways
from minato_gpu.sampling.occurrences import Plane, occurrences_of
from minato_gpu.sampling.orders import KEYS, REPLAY, STATE, Order
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.sampling.sources import Source, source_of
from minato_gpu.sampling.worker_streams import WorkerStreams
from minato_gpu.snapshots import Snapshot

_CUTTING = ("batch_size", "drop_last")


def begin_epoch(
    loader: Arguments,
    number: int,
    seed: int,
    batches: Iterator[Value],
    resumption: Resumption | None,
    workers: tuple[int, int] | None = None,
) -> EpochProgress:
    """An epoch from its beginning, or from where a state says. ``seed``: its base seed where it begins; ``batches``:
    the loader's batch sampler's iterator; ``workers``: seed and first epoch of workers that persist."""
    sampling = Sampling(loader)
    if resumption is not None and resumption.begun:
        resumption.set_generators()
        source = resumption.source(loader)
        if source.streams is None and source.order.way != REPLAY:
            resumption.globals.put_again()  # a sampler may draw as it is iterated, whether that is its order or not
        progress = EpochProgress(loader, source, workers, resumption.gone)
        progress.globals_at_start = resumption.state["source"].get("global")
        return progress
    if not sampling.iterable:
        order = ways.fresh_order(sampling, batches)
        return EpochProgress(loader, source_of(loader, number, seed, order), workers)
    source = source_of(loader, number, seed, Order(batches, generators=sampling.generators))
    source.streams = WorkerStreams(max(1, loader.num_workers))
    if resumption is not None and resumption.starts:
        source.streams.begin(resumption.starts, resumption.starts)
    return EpochProgress(loader, source, workers)


class Resumption:
    """A checked state, on its way to the next iterator; a copy, which nobody changes."""

    @s.within_depth()
    def __init__(self, loader: Arguments, state: JSON) -> None:
        self._sampling = Sampling(loader)
        self._persistent = loader.persistent_workers and loader.num_workers > 0
        if isinstance(state, Mapping):
            self._given = Snapshot(dict(state))
            state = self._given.copy()
        self.state = ranks.for_rank(s.check(state), self._sampling)
        self.number: int = self.state["epoch"]
        self.begun: bool = self.state["begun"]
        self._between = not self.begun  # the state is one of a loader between two epochs
        self._stored: list[list[Key]] = []
        self._counted: tuple[list[Plane], dict[Key, int]] = ([], {})
        self.gone: s.State | None = None  # of the whole order, before it was dealt out to these ranks
        self.starts: list[StreamState] = []  # of an iterable data set's streams
        self._epoch_of_sampler = self._check(loader) if self.begun else None
        if not self.begun and self._sampling.iterable:
            self.starts = starts_between(self.state["source"], loader.dataset, loader.num_workers)
        parts = (self.state, self.state["source"])
        found = [{} if part.get("global") is None else s.mapping(part, "global") for part in parts]
        self.globals = process_generators.Waiting(loader, self._sampling, *found)
        if self._epoch_of_sampler is not None:
            self._sampling.inner.set_epoch(self._epoch_of_sampler)

    def _check(self, loader: Arguments) -> int | None:
        """Whether the state fits this loader; returns the epoch that its sampler had been told of, if it has one."""
        if (self.state["kind"] == "iterable") != self._sampling.iterable:
            raise ValueError(
                f"the state is one of a data set of kind {self.state['kind']!r}, and this loader has another"
            )
        if self.state["kind"] == "iterable":
            self._agree(*_CUTTING)
            source, samples = self.state["source"], loader.batch_size or 1
            self.starts = check_streams(source, loader.dataset, loader.num_workers, samples)
            return None
        drawn_again = self.state["source"].get("way") == REPLAY
        self._agree("sampler", *_CUTTING)
        if drawn_again:  # any other may not hold to its length, or vary it
            self._agree("length")
        return self._check_source(loader)

    def _agree(self, *names: str) -> None:
        source, mine = self.state["source"], self._sampling.describe()
        for name in names:
            if not s.alike(source.get(name), mine[name]):
                meaning, theirs = name.replace("length", "length of the sampler"), s.quoted(source.get(name))
                raise ValueError(f"the state was saved with {meaning} {theirs}, this loader has {s.quoted(mine[name])}")

    def _check_source(self, loader: Arguments) -> int | None:
        source = self.state["source"]
        s.choice(source, "way", (STATE, REPLAY, KEYS))
        if source["way"] == REPLAY and not self._sampling.replays:
            raise ValueError("the state says that the order can be drawn again, but this sampler gives no such promise")
        self.delivered = positions_of(s.mapping(self.state, "progress"))
        checks.match_progress(loader, self.delivered, self._sampling, source)
        if source["way"] == REPLAY:
            check_drawn_again(self.delivered.low, most_drawn_again(loader))
            if source.get("order_drawn") is not None:
                s.choice(source, "order_drawn", (True, False))
            self.gone = ranks.gone_of(source, self._sampling)
        else:
            self._stored, self._counted = checks.stored(source, self.delivered, self._sampling)
        told = source.get("set_epoch") is not None and self._sampling.told_epoch is not None
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
        return told and self._sampling.told_epoch != self._epoch_of_sampler

    def move_on(self) -> None:
        """Begin the epoch after that of the state, as if that had ended; say that what it had left is given up."""
        warnings.warn(
            f"load_state_dict() was given a state in the middle of the sampler's epoch {self._epoch_of_sampler}, and "
            f"set_epoch({self._sampling.told_epoch}) has been called since: that epoch begins at its start, and "
            "what was left of the other is not delivered.",
            stacklevel=4,
        )
        self.begun, self.number = False, self.number + 1

    @property
    def knows_seed(self) -> bool:
        """Whether the base seed of the epoch, or of the workers that go on, need not be drawn."""
        return self.begun or (self._persistent and self.number != self.state["workers_epoch"])

    @property
    def workers(self) -> tuple[int, int]:
        """The base seed of the workers, and the epoch in which those started."""
        return self.state["workers_seed"], self.state["workers_epoch"]

    def order_states(self) -> dict[str, torch.Tensor]:
        """The generators' states just before the epoch's order was drawn, by role."""
        return s.generators(self.state["generators"])

    def set_generators(self) -> None:
        """Put the generators that belong to loader and sampler to where they were."""
        self._sampling.set_generators(self.order_states())

    def load_sampler(self) -> None:
        """Give a stateful sampler the state that it had between two epochs."""
        if not self._between:
            return
        own = _own(s.mapping(self.state["source"], "state"))
        ways.load_ended(self._sampling, own, self.order_states())
        self.globals.put_again()  # the sampler may have drawn as it was iterated

    def source(self, loader: Arguments) -> Source:
        """The rest of the epoch. Raises ValueError where the loader's sampler yields another order."""
        saved, number, seed = self.state["source"], self.number, self.state["seed"]
        if self.state["kind"] == "iterable":
            later = self._persistent and number != self.state["workers_epoch"]
            anew = loader.num_workers > 0 and (later or loader.worker_kind == "thread")
            tell_read_again(self.starts, self._sampling.size or 1, draws_anew=anew)
            source = source_of(loader, number, seed, Order(iter(()), generators=self._sampling.generators))
            source.streams = resumed_streams(saved, self.starts)
            return source
        replays = saved["way"] == REPLAY
        order = self._replayed(saved) if replays else self._from_state(saved)
        begin: dict[str, int] = {} if replays else {name: saved[name] for name in ("place", "position")}
        occurrences = occurrences_of(loader)
        source = Source(number, seed, order, self._sampling, occurrences, delivered=self.delivered, **begin)
        if source.occurrences.used and saved.get("counted") is False:
            raise ValueError(
                "the state was saved without workers and holds no count of the keys that have come, which cannot be "
                "stored; a loader with workers or a pipeline needs that: pass num_workers=0"
            )
        source.occurrences.restore(*self._counted)
        if saved.get("digest") is not None:
            digest = s.mapping(saved, "digest")
            source.expected = s.number(digest, "below"), s.number(digest, "crc")
        source.skip()
        witness = saved.get("witness")
        if source.witness is not None and witness is not None and not s.alike(source.witness, witness):
            raise ValueError(
                "the sampler yields another order than when the state was saved; data set, sampler and its seed must "
                "be the same"
            )
        return source

    def _replayed(self, saved: Mapping[str, JSON]) -> Order:
        begun_from = dict(self.state["generators"])
        if self.gone is not None:
            keys = ranks.dealt(self._sampling.inner, self.gone)
            return Order(self._sampling.cut(keys), begun_from=begun_from)
        default = self.order_states().get("default") if self._sampling.uses_default_generator else None
        drawn = saved.get("order_drawn")  # not said by earlier versions
        drawn = self.delivered.top > 0 if drawn is None else drawn
        return ways.replayed_order(self._sampling, default, begun_from, drawn=drawn)

    def _from_state(self, saved: Mapping[str, JSON]) -> Order:
        """What is stored, and after that what the sampler yields from its state."""
        own = _own(saved["state"])
        taken = {} if saved.get("generators") is None else s.generators(saved["generators"])
        if saved["ended"]:
            order = ways.order_at_end(self._sampling, own, saved["way"], taken)
        else:
            order = ways.order_from_state(self._sampling, own, taken, checks.following(saved))
        items = self._stored if self._sampling.batched else [key for keys in self._stored for key in keys]
        order.coming.extendleft((None, item) for item in reversed(items))
        return order


@s.within_depth()
def _own(saved: Mapping[str, JSON]) -> Snapshot:
    """A copy of the states of the sampler, its iterator and the sampler in it."""
    return Snapshot({name: saved.get(name) for name in ("sampler", "iterator", "nested")})
