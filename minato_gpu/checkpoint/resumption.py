"""Turns a state into an epoch that goes on where another left off.

A state may come from any file: what can be checked is checked as it is loaded, and what only the sampler can tell while
its order is drawn (sampling/epoch_batches.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint import ranks
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.cursor import Cursor
from minato_gpu.checkpoint.global_generator import GlobalGenerator
from minato_gpu.checkpoint.streams import check_streams, resumed_streams, starts_between, warn_of_draws
from minato_gpu.lanes.snapshots import Snapshot
from minato_gpu.lanes.streams import StreamState
from minato_gpu.samples import JSON, Key, Value, name_of
from minato_gpu.sampling import order as orders
from minato_gpu.sampling.delivered_positions import DeliveredPositions
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
    """Begins an epoch, at its beginning or where a state (``resumption``) says, and returns its cursor.

    ``seed`` is its base seed, unless a state says that; ``batches`` iterates the loader's batch sampler; ``workers``
    are seed and first epoch of persistent workers. Raises as ``Resumption.epoch``.
    """
    sampling = Sampling(loader)
    if resumption is not None and resumption.begun:
        resumption.set_generators()
        epoch = resumption.epoch(loader, batches)
        if epoch.streams is None and epoch.order.way != REPLAY:
            resumption.globals.put_again()  # a sampler may draw as it is iterated, whether that is its order or not
        return Cursor(loader, epoch, workers, resumption.gone)
    epoch = EpochBatches(loader, number, seed, orders.fresh_order(sampling, batches))
    if sampling.iterable:
        epoch.streams = WorkerStreams(max(1, loader.num_workers))
        if resumption is not None and resumption.starts:
            epoch.streams.begin(resumption.starts, resumption.starts)
    return Cursor(loader, epoch, workers)


class Resumption:
    """A checked state, of which the next iterator makes an epoch. It is a copy, which nothing else changes.

    Raises TypeError or ValueError for a state that is damaged or does not fit the loader. Gives the sampler, by its
    ``set_epoch``, the epoch that the state names, if any.
    """

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
        """Checks that the state fits this loader, and keeps what it says. Returns the epoch for the sampler's
        ``set_epoch``; None if the state or this sampler has none."""
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
        self.delivered = s.positions_of(s.mapping(self.state, "progress"))
        replays = s.choice(source, "way", (STATE, REPLAY, KEYS)) == REPLAY
        if replays:
            self._agree("length")  # any other may not hold to its length, or vary it
            if not self._sampling.replays:
                raise ValueError(
                    "the state says that the order can be drawn again, but this sampler gives no such promise"
                )
            s.choice(source, "order_drawn", (True, False))
        self._check_delivered(loader)
        if not replays:
            self._stored = _Stored(source, self.delivered, self._sampling)
        self.gone = ranks.gone_of(source, self._sampling)
        given = source.get("set_epoch") is not None and self._sampling.sampler_epoch is not None
        return s.number(source, "set_epoch") if given else None

    def _check_delivered(self, loader: Arguments) -> None:
        """Checks a state of which later samples were delivered before earlier ones: this loader must deliver out of
        order too, and so many batches must hold so many samples. Any other state passes."""
        delivered, sampling = self.delivered, self._sampling
        if delivered.above and (loader.in_order or loader.max_lateness == 0 or loader.num_workers == 0):
            raise ValueError(
                "the state was saved with batches delivered out of order, which a loader in strict order cannot go on "
                "with; pass in_order=False and num_workers=1 or more"
            )
        if delivered.above and sampling.size is not None and delivered.samples != delivered.batches * sampling.size:
            raise ValueError(
                f"state: {delivered.batches} batches of {sampling.size} cannot hold {delivered.samples} samples"
            )

    def _agree(self, *names: str) -> None:
        source, mine = self.state["source"], self._sampling.describe()
        for name in names:
            if not s.alike(source.get(name), mine[name]):
                meaning, theirs = name.replace("length", "length of the sampler"), s.quoted(source.get(name))
                raise ValueError(f"the state was saved with {meaning} {theirs}, this loader has {s.quoted(mine[name])}")

    def fits(self, loader: Arguments) -> bool:
        """Returns whether the loader has as many workers as when it was given the state: streams are shared out
        among them. True for a state without streams."""
        return len(self.starts) in (0, max(1, loader.num_workers))

    @property
    def given(self) -> s.State:
        """The state as it was given, as a copy."""
        out: s.State = self._given.copy()
        return out

    @property
    def is_superseded(self) -> bool:
        """True if ``set_epoch`` has given the sampler another epoch since the state was loaded: then that one begins,
        at its start, and the rest of the state's epoch is to be given up (``give_up_rest``)."""
        given = self.begun and self._sampler_epoch is not None
        return given and self._sampling.sampler_epoch != self._sampler_epoch

    def give_up_rest(self) -> None:
        """Gives up the rest of the state's epoch, with a warning: the next iterator begins a whole epoch, the one that
        ``set_epoch`` has given the sampler. Its number, the loader's own count, is that of the state plus 1."""
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
        """Sets the generators that belong to loader and sampler to their saved states; torch's global one stays."""
        self._sampling.set_generators(self._generators())

    def load_sampler(self) -> None:
        """Gives the sampler and the generators the states that they had between two epochs; does nothing with a state
        of the middle of one. Raises ValueError if the sampler takes no state."""
        if not self._between:
            return
        orders.load_ended(self._sampling, _own(s.mapping(self.state["source"], "state")), self._generators())
        self.globals.put_again()  # the sampler may have drawn as it was iterated

    def epoch(self, loader: Arguments, batches: Iterator[Value]) -> EpochBatches:
        """Returns the rest of the epoch. Raises ValueError if the loader's sampler yields another order."""
        saved, number, seed = self.state["source"], self.number, self.state["seed"]
        if self.state["kind"] == "iterable":
            later = self._persistent and number != self.state["workers_epoch"]
            if loader.num_workers > 0 and (later or loader.worker_kind == "thread"):
                warn_of_draws(self.starts)
            epoch = EpochBatches(loader, number, seed, Order(iter(())))
            epoch.streams = resumed_streams(saved, self.starts)
            return epoch
        if saved["way"] == REPLAY:
            epoch = EpochBatches(loader, number, seed, self._replayed(saved, batches), delivered=self.delivered)
            epoch.skip()
            witness = saved.get("witness")
            if epoch.witness is not None and witness is not None and not s.alike(epoch.witness, witness):
                raise ValueError(
                    "the sampler yields another order than when the state was saved; data set, sampler and its seed "
                    "must be the same"
                )
            return epoch
        begin = {name: saved[name] for name in ("place", "position")}
        order = self._stored.order(self._sampling, self._generators())
        epoch = EpochBatches(loader, number, seed, order, delivered=self.delivered, **begin)
        self._stored.restore(epoch)
        epoch.skip()
        return epoch

    def _replayed(self, saved: Mapping[str, JSON], batches: Iterator[Value]) -> Order:
        sampling, begun_from = self._sampling, dict(self.state["generators"])
        if self.gone is not None:
            return Order(sampling.cut(ranks.dealt(sampling.inner, self.gone)), begun_from=begun_from)
        if not saved["order_drawn"]:
            return orders.fresh_order(sampling, batches)
        default = self._generators().get("default") if sampling.uses_default_generator else None
        return orders.replayed_order(sampling, default, begun_from)


class _Stored:
    """A checked snapshot that begins with stored keys: with all that are left, or with a sampler's state after them.

    Raises ValueError if its parts do not fit together.
    """

    def __init__(self, source: Mapping[str, JSON], delivered: DeliveredPositions, sampling: Sampling) -> None:
        place, position, size = s.number(source, "place"), s.number(source, "position"), sampling.size
        if place > delivered.batches or position > delivered.low:
            raise ValueError(f"state: place {place} at position {position} lies after what was delivered")
        if size is not None and not (place - 1) * size < position <= place * size:
            raise ValueError(f"state: place {place} of batches of {size} is not at position {position}")
        self._own = _own(s.mapping(source, "state"))
        self._way: str = source["way"]
        self._ended = s.choice(source, "ended", (True,) if self._way == KEYS else (True, False))
        self._witness = None if source.get("witness") is None else s.number(source, "witness")
        self._batches = s.batches_of(source)
        self._occurrences = list(map(_counts_of, s.sequence(source, "occurrences"), self._batches))
        size, short = sampling.size if sampling.batched else 1, self._ended and not sampling.drop_last
        for number, keys in enumerate(self._batches, 1):
            last = short and number == len(self._batches)
            if size is not None and len(keys) != size and not (last and len(keys) < size):
                raise ValueError(f"state: a stored batch of {len(keys)} keys among batches of {size}")
        last, end = place + len(self._batches), position + sum(map(len, self._batches))
        if delivered.low > end or (self._ended and (delivered.batches > last or delivered.top > end)):
            raise ValueError(
                f"state: {delivered.batches} batches delivered up to position {delivered.top}, and the stored order "
                f"ends after {last} at {end}"
            )
        self._others: dict[Key, int] = {}
        for pair in s.sequence(source, "others"):
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise ValueError(f"state: 'others' must hold pairs, got {s.quoted(pair)}")
            self._others[name_of(s.key_of(pair[0]))] = s.number({"count": pair[1]}, "count")
        self._counts = [s.unpacked({"counts": plane}, "counts") for plane in s.sequence(source, "counts")]

    def order(self, sampling: Sampling, generators: Mapping[str, torch.Tensor]) -> Order:
        """Returns the order of the stored keys and of what the sampler, given its state, yields after them.

        If the sampler had ended, nothing follows; it and its generators then get their states at the end, which
        ``generators`` holds by role. Raises ValueError as ``order_from_state`` and ``load_ended``.
        """
        if self._ended:
            order = orders.order_at_end(sampling, self._own, self._way, generators)
        else:
            order = orders.order_from_state(sampling, self._own, self._witness)
        items = self._batches if sampling.batched else [key for keys in self._batches for key in keys]
        order.coming.extend(items)
        return order

    def restore(self, epoch: EpochBatches) -> None:
        """Goes on counting the keys of the epoch; from zero where the earlier run did not count."""
        if self._counts or self._others:
            epoch.occurrences.restore(self._counts, self._others)
            epoch.counted.extend(self._occurrences)


@s.within_depth()
def _own(saved: Mapping[str, JSON]) -> Snapshot:
    """Returns a copy of the states of the sampler, its iterator and the sampler in it."""
    return Snapshot({name: saved.get(name) for name in ("sampler", "iterator", "nested")})


def _counts_of(plain: JSON, keys: list[Key]) -> list[int] | None:
    """Returns how often each of these keys had come before, None where the earlier run did not count. Raises ValueError
    unless there is one whole number for each key."""
    if plain is None:
        return None
    counts = [
        s.number({"occurrences": count}, "occurrences") for count in s.sequence({"occurrences": plain}, "occurrences")
    ]
    if len(counts) != len(keys):
        raise ValueError(f"state: {len(counts)} 'occurrences' of a batch of {len(keys)} keys")
    return counts
