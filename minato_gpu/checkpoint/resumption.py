"""Turns a state into an epoch that goes on where another left off."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint import checks, ranks
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.cursor import Cursor
from minato_gpu.checkpoint.global_generator import GlobalGenerator
from minato_gpu.checkpoint.streams import check_streams, explain_reading, resumed_streams, starts_between
from minato_gpu.lanes.snapshots import Snapshot
from minato_gpu.lanes.streams import StreamState
from minato_gpu.samples import JSON, Key, Value
from minato_gpu.sampling import order as orders
from minato_gpu.sampling.epoch_batches import EpochBatches
from minato_gpu.sampling.order import KEYS, REPLAY, STATE, Order
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.sampling.worker_streams import WorkerStreams

_CUTTING = ("batch_size", "drop_last")


def begin_epoch(
    loader: Arguments,
    number: int,
    seed: int,
    batches: Iterator[Value],
    resumption: Resumption | None,
    workers: tuple[int, int] | None = None,
) -> Cursor:
    """Begins an epoch, at its beginning or where a state says.

    ``seed`` is its base seed if it begins; ``batches`` iterates the loader's batch sampler; ``workers`` are seed and
    first epoch of persistent workers.
    """
    sampling = Sampling(loader)
    if resumption is not None and resumption.begun:
        resumption.set_generators()
        epoch = resumption.epoch(loader)
        if epoch.streams is None and epoch.order.way != REPLAY:
            resumption.globals.put_again()  # a sampler may draw as it is iterated, whether that is its order or not
        cursor = Cursor(loader, epoch, workers, resumption.gone)
        cursor.global_at_start = resumption.state["source"].get("global_at_start")
        return cursor
    epoch = EpochBatches(loader, number, seed, orders.fresh_order(sampling, batches))
    if sampling.iterable:
        epoch.streams = WorkerStreams(max(1, loader.num_workers))
        if resumption is not None and resumption.starts:
            epoch.streams.begin(resumption.starts, resumption.starts)
    return Cursor(loader, epoch, workers)


class Resumption:
    """A checked state, of which the next iterator makes an epoch. It is a copy, which nothing else changes."""

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
        self._counted: checks.Counted = ([], {})
        # what was delivered of the whole order, before it was dealt out to these ranks
        self.gone: s.State | None = None
        self.starts: list[StreamState] = []  # starts of an iterable data set's streams
        self._sampler_epoch = self._check(loader) if self.begun else None
        if not self.begun and self._sampling.iterable:
            self.starts = starts_between(self.state["source"], loader.dataset, loader.num_workers)
        self.globals = GlobalGenerator(loader, self._sampling, self.state)
        if self._sampler_epoch is not None:
            self._sampling.inner.set_epoch(self._sampler_epoch)

    def _check(self, loader: Arguments) -> int | None:
        """Checks that the state fits this loader. Returns the epoch that its sampler had been given, if it has one."""
        source = self.state["source"]
        if (self.state["kind"] == "iterable") != self._sampling.iterable:
            raise ValueError(
                f"the state is one of a data set of kind {self.state['kind']!r}, and this loader has another"
            )
        if self.state["kind"] == "iterable":
            self._agree(*_CUTTING)
            self.starts = check_streams(source, loader.dataset, loader.num_workers, loader.batch_size or 1)
            return None
        self._agree("sampler", *_CUTTING)
        replays = s.choice(source, "way", (STATE, REPLAY, KEYS)) == REPLAY
        if replays:  # any other may not hold to its length, or vary it
            self._agree("length")
        if replays and not self._sampling.replays:
            raise ValueError("the state says that the order can be drawn again, but this sampler gives no such promise")
        self.delivered = s.positions_of(s.mapping(self.state, "progress"))
        checks.match_progress(loader, self.delivered, self._sampling, source)
        if not replays:
            self._stored, self._counted = checks.stored(source, self.delivered, self._sampling)
        elif source.get("order_drawn") is not None:
            s.choice(source, "order_drawn", (True, False))
        position = 0 if replays else source["position"]
        checks.check_drawn_again(position, self.delivered.low, checks.most_drawn_again(loader))
        self.gone = ranks.gone_of(source, self._sampling)
        given = source.get("set_epoch") is not None and self._sampling.sampler_epoch is not None
        return s.number(source, "set_epoch") if given else None

    def _agree(self, *names: str) -> None:
        source, mine = self.state["source"], self._sampling.describe()
        for name in names:
            if not s.alike(source.get(name), mine[name]):
                meaning, theirs = name.replace("length", "length of the sampler"), s.quoted(source.get(name))
                raise ValueError(f"the state was saved with {meaning} {theirs}, this loader has {s.quoted(mine[name])}")

    def fits(self, loader: Arguments) -> bool:
        """Returns whether the loader has as many workers as when it was given the state: streams are shared out
        among them."""
        return len(self.starts) in (0, max(1, loader.num_workers))

    @property
    def given(self) -> s.State:
        """The state as it was given, as a copy."""
        out: s.State = self._given.copy()
        return out

    @property
    def moved_on(self) -> bool:
        """True if ``set_epoch`` has given the sampler another epoch since: then that epoch begins, at its start."""
        given = self.begun and self._sampler_epoch is not None
        return given and self._sampling.sampler_epoch != self._sampler_epoch

    def move_on(self) -> None:
        """Begins the epoch after that of the state, as if that had ended, and warns that the rest of it is given up."""
        warnings.warn(
            f"load_state_dict() was given a state in the middle of the sampler's epoch {self._sampler_epoch}, and "
            f"set_epoch({self._sampling.sampler_epoch}) has been called since: that epoch begins at its start, and "
            "what was left of the other is not delivered.",
            stacklevel=4,
        )
        self.begun, self.number = False, self.number + 1

    @property
    def knows_seed(self) -> bool:
        """True if the base seed of the epoch, or of the workers that go on, is known and need not be drawn."""
        return self.begun or (self._persistent and self.number != self.state["workers_epoch"])

    @property
    def workers(self) -> tuple[int, int]:
        """The base seed of the workers, and the epoch in which they started."""
        return self.state["workers_seed"], self.state["workers_epoch"]

    def _generators(self) -> dict[str, torch.Tensor]:
        return s.generators(self.state["generators"])

    def set_generators(self) -> None:
        """Sets the generators that belong to loader and sampler to where they were."""
        self._sampling.set_generators(self._generators())

    def load_sampler(self) -> None:
        """Gives a stateful sampler the state that it had between two epochs."""
        if not self._between:
            return
        orders.load_ended(self._sampling, _own(s.mapping(self.state["source"], "state")), self._generators())
        self.globals.put_again()  # the sampler may have drawn as it was iterated

    def epoch(self, loader: Arguments) -> EpochBatches:
        """Returns the rest of the epoch. Raises ValueError if the loader's sampler yields another order."""
        saved, number, seed = self.state["source"], self.number, self.state["seed"]
        if self.state["kind"] == "iterable":
            later = self._persistent and number != self.state["workers_epoch"]
            anew = loader.num_workers > 0 and (later or loader.worker_kind == "thread")
            explain_reading(self.starts, self._sampling.size or 1, draws_anew=anew)
            epoch = EpochBatches(loader, number, seed, Order(iter(())))
            epoch.streams = resumed_streams(saved, self.starts)
            return epoch
        replays = saved["way"] == REPLAY
        order = self._replayed(saved) if replays else self._from_state(saved)
        begin: dict[str, int] = {} if replays else {name: saved[name] for name in ("place", "position")}
        epoch = EpochBatches(loader, number, seed, order, delivered=self.delivered, **begin)
        if epoch.occurrences.used and saved.get("counted") is False:
            raise ValueError(
                "the state was saved without workers and holds no count of the keys that have come, which cannot be "
                "stored; a loader with workers or a pipeline needs that: pass num_workers=0"
            )
        epoch.occurrences.restore(*self._counted)
        if saved.get("checksum") is not None:
            checksum = s.mapping(saved, "checksum")
            epoch.expected = s.number(checksum, "below"), s.number(checksum, "crc")
        epoch.skip()
        witness = saved.get("witness")
        if epoch.witness is not None and witness is not None and not s.alike(epoch.witness, witness):
            raise ValueError(
                "the sampler yields another order than when the state was saved; data set, sampler and its seed must "
                "be the same"
            )
        return epoch

    def _replayed(self, saved: Mapping[str, JSON]) -> Order:
        begun_from = dict(self.state["generators"])
        if self.gone is not None:
            keys = ranks.dealt(self._sampling.inner, self.gone)
            return Order(self._sampling.cut(keys), begun_from=begun_from)
        default = self._generators().get("default") if self._sampling.uses_default_generator else None
        drawn = saved.get("order_drawn") is not False
        return orders.replayed_order(self._sampling, default, begun_from, drawn=drawn)

    def _from_state(self, saved: Mapping[str, JSON]) -> Order:
        """Returns the order of what is stored, and after that what the sampler yields from its state."""
        own = _own(saved["state"])
        if saved["ended"]:
            order = orders.order_at_end(self._sampling, own, saved["way"], self._generators())
        else:
            order = orders.order_from_state(self._sampling, own, checks.following(saved))
        items = self._stored if self._sampling.batched else [key for keys in self._stored for key in keys]
        order.coming.extendleft((None, item) for item in reversed(items))
        return order


@s.within_depth()
def _own(saved: Mapping[str, JSON]) -> Snapshot:
    """Returns a copy of the states of the sampler, its iterator and the sampler in it."""
    return Snapshot({name: saved.get(name) for name in ("sampler", "iterator", "nested")})
