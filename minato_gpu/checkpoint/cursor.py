"""The position of an epoch, and the plain data that ``DataLoader.state_dict`` is made of.

A state holds what was delivered and one snapshot of what yields the samples (sampling/order.py): the generators as the
epoch began, a sampler's own state, the keys that are left, or the states of an iterable data set's streams. A resume
draws again from the snapshot, and drops what was delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint import checks, global_generator, ranks
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.streams import plain_between, plain_streams
from minato_gpu.lanes.snapshots import Snapshot
from minato_gpu.lanes.streams import StreamState
from minato_gpu.samples import Key, witness_of
from minato_gpu.sampling.delivered_positions import HISTORY, DeliveredPositions
from minato_gpu.sampling.epoch_batches import BatchStart, EpochBatches
from minato_gpu.sampling.occurrences import Occurrences
from minato_gpu.sampling.order import ENOUGH, KEYS, REPLAY, states_between
from minato_gpu.sampling.packing import packed, packed_state, packed_states
from minato_gpu.sampling.samplers import Sampling


class Cursor:
    """Keeps the position of one epoch of a loader, from its ``iter()`` on."""

    def __init__(
        self,
        loader: Arguments,
        epoch: EpochBatches,
        workers: tuple[int, int] | None = None,
        gone: s.State | None = None,
    ) -> None:
        """``workers`` is the seed of persistent workers and the epoch in which they started, else the epoch's own.

        ``gone``: after a resume with another number of ranks, what had been delivered of the whole order.
        """
        self.epoch = epoch
        self.over = False  # the epoch has ended
        # state of torch's global generator as the epoch began, for an iterable data set read in the main process
        self.global_at_start: str | None = None
        self._seeds = (epoch.seed, *(workers or (epoch.seed, epoch.number)))
        self._sampling = Sampling(loader)
        expected = self._sampling.expected
        # samples of the epoch that are left, where the sampler tells
        self.expected = None if expected is None or gone is not None else max(0, expected - epoch.delivered.samples)
        self._most_again = checks.most_drawn_again(loader)
        self._gone = gone
        self._remaining: _Remaining | None = None
        self._saves_global = global_generator.concerns(loader, self._sampling)
        self._asked = b""  # state of torch's global generator before the batch that is asked for
        self._before: deque[bytes] = deque(maxlen=HISTORY)  # and before each of the last delivered batches

    def asked(self) -> None:
        """Notes that the next batch is about to be taken or, without workers, to be prepared."""
        # states are large and mostly equal: keep one object for all equal ones
        if self._saves_global and (state := global_generator.now()) != self._asked:
            self._asked = state

    def delivered(self, batch: Sequence[tuple[int, int]], failed: int = 0, *, returned: bool = True) -> None:
        """Notes that the consumer has this batch: its positions, or the ticket of a stream's batch.

        For the other arguments see ``DeliveredPositions.add``.
        """
        epoch = self.epoch
        with epoch.lock:
            if returned or epoch.streams is not None:
                self._before.append(self._asked)
            if epoch.streams is not None:
                epoch.streams.delivered(batch[0][0])
            else:
                epoch.delivered.add(batch, failed, returned=returned)

    @property
    def batches(self) -> int:
        """The number of batches of the epoch that the consumer has, or had in an earlier run, with those that were
        left out."""
        return self.epoch.delivered.batches if self.epoch.streams is None else self.epoch.streams.batches

    @property
    def ended_with_batches(self) -> bool:
        """True if the epoch is over and a stream has yielded any batch."""
        streams = self.epoch.streams
        return self.over and streams is not None and streams.batches > 0

    def state(self, ahead: int) -> s.State:
        """Returns the state of the epoch as it was ``ahead`` batches ago. May be called by any thread.

        Raises ValueError if it is not known.
        """
        epoch = self.epoch
        with epoch.lock:
            if epoch.streams is None:
                out = {**s.header("map", epoch.number, self._seeds, begun=True), **self._of_sampler(ahead)}
            else:
                streams = plain_streams(epoch.streams, ahead, self._sampling.size or 1)
                out = s.header("iterable", epoch.number, self._seeds, begun=True)
                out["generators"] = packed_states(self._sampling.generators)
                out["source"] = {**self._sampling.cutting, **streams, "rank": ranks.rank_of(self._sampling)}
                if self.global_at_start is not None and streams["streams"][0]["state"] is None:
                    out["source"]["global_at_start"] = self.global_at_start
            if self._saves_global:
                out["global"] = packed(self._before[-ahead]) if ahead else global_generator.plain()
            return out

    def _of_sampler(self, ahead: int) -> s.State:
        """Returns what was delivered, and the snapshot from which a resume draws what comes after that."""
        epoch, order, sampling = self.epoch, self.epoch.order, self._sampling
        delivered = epoch.delivered.rewound(ahead)
        source = {**sampling.describe(), "way": order.way, "set_epoch": epoch.sampler_epoch}
        source["rank"] = ranks.rank_of(sampling)
        if order.way == REPLAY:
            checks.check_drawn_again(0, delivered.low, self._most_again)
            begun = order.begun_from
            generators = packed_states(sampling.generators) if begun is None else dict(begun)
            source.update(self._replay(delivered))
        elif order.way == KEYS:
            self._remaining = self._remaining or _Remaining(epoch, sampling)
            source.update(self._remaining.since(epoch.since(delivered.low)))
            generators = packed_states(sampling.generators)  # after all keys that are stored have been drawn
        else:
            found, generators = self._snapshot(epoch.since(delivered.low))
            source.update(found)
        return {"progress": s.plain_positions(delivered), "source": source, "generators": generators}

    def _replay(self, delivered: DeliveredPositions) -> s.State:
        epoch = self.epoch
        out: s.State = {"witness": epoch.witness, "gone": self._gone and self._gone.copy()}
        for below, crc in reversed(epoch.checksums):
            if 0 < below <= delivered.low:
                out["checksum"] = {"below": below, "crc": crc}
                break
        # if the order has been drawn, a resume that draws it again must not advance the user's global generator, even
        # where a seed has set that back to where the order began
        if self._sampling.uses_default_generator:
            out["order_drawn"] = epoch.order.begun_from is not None
        return out

    def _snapshot(self, starts: list[BatchStart]) -> tuple[s.State, dict[str, str]]:
        """Returns the sampler's own state with the keys before and after it, and the generators.

        It is the first snapshot at or after ``starts``; if no drawn batch has one, keys are drawn ahead until one has.
        """
        epoch, order = self.epoch, self.epoch.order
        order.expect_saves()
        if not any(start.snapshot for start in starts) and not any(snapshot for snapshot, _ in order.coming):
            order.fill_to_snapshot()
        found = [(start.snapshot, start.keys) for start in starts]
        found += [(snapshot, self._sampling.keys_of(item)) for snapshot, item in order.coming]
        at = next((at for at, (snapshot, _) in enumerate(found) if snapshot is not None), len(found))
        snapshot = order.at_end() if at == len(found) else found[at][0]
        assert snapshot is not None
        if snapshot.error is not None:
            raise ValueError(f"this epoch cannot be saved: {snapshot.error}")
        before, following = ([keys for _, keys in part] for part in (found[:at], found[at:]))
        out: s.State = {
            "place": starts[0].place if starts else epoch.place,
            "position": starts[0].position if starts else epoch.position,
            "state": snapshot.own.copy(),
            "ended": not following,
            **_plain_counts(epoch.occurrences_before(starts)),
        }
        if before:
            out.update(_plain_first(before))
        if following:
            out["next"] = _following(following)
        return out, {role: packed_state(state) for role, state in snapshot.generators.items()}


def _following(batches: list[list[Key]]) -> s.State:
    """Returns a hash of the first keys after a snapshot, and how many batches they are from: a resume compares them."""
    keys: list[Key] = []
    items = 0
    while items < len(batches) and len(keys) < ENOUGH:
        keys, items = keys + batches[items], items + 1
    return {"items": items, "witness": witness_of(keys)}


def _plain_counts(occurrences: Occurrences) -> s.State:
    """Returns how often each key had come, as plain data.

    Raises ValueError for keys that cannot be stored, if samples are seeded by those counts.
    """
    planes, others = occurrences.planes()
    try:
        plain = [[s.plain_key(key), count] for key, count in others.items()]
    except ValueError:
        if occurrences.used:
            raise
        return {"planes": [], "others": [], "counted": False}
    return {"planes": [[ones, packed(plane)] for ones, plane in planes], "others": plain}


def _plain_first(batches: list[list[Key]]) -> s.State:
    try:
        return s.plain_batches(batches)
    except ValueError as error:
        raise ValueError(
            "this epoch can be saved once its first batch has been delivered: a sampler's own state is known only when "
            f"it has yielded a key, and what came before that must be stored. {error}"
        ) from None


class _Remaining:
    """The keys that a sampler of unknown kind still yields, as plain data: drawn and made plain once, then only cut.

    It begins where the first save finds the oldest batch that may be asked for; later ones begin further on.
    """

    def __init__(self, epoch: EpochBatches, sampling: Sampling) -> None:
        starts = list(epoch.starts)
        epoch.order.draw_rest()
        batches = [start.keys for start in starts] + [sampling.keys_of(item) for _, item in epoch.order.coming]
        before = epoch.occurrences.before([key for start in starts for key in start.keys])
        first: BatchStart | EpochBatches = starts[0] if starts else epoch
        self._place, self._position, self._epoch = first.place, first.position, epoch
        self._plain = s.plain_batches(batches)
        self._batches = self._plain["drawn"]
        self._flat = not any(type(key) is list for keys in self._batches for key in keys)
        self._occurrences = before.count([key for keys in batches for key in keys]) or []
        self._nested = Snapshot({"nested": states_between(sampling, epoch.order)["nested"]})

    def since(self, starts: list[BatchStart]) -> s.State:
        """Returns the remaining keys from the first of these batches on. The result is the caller's own."""
        first: BatchStart | EpochBatches = starts[0] if starts else self._epoch
        batches = self._batches[first.place - self._place :]
        return {
            **self._plain,
            "place": first.place,
            "position": first.position,
            "state": self._nested.copy(),
            "ended": True,
            "drawn": [keys.copy() for keys in batches] if self._flat else Snapshot(batches).copy(),
            "occurrences": self._occurrences[first.position - self._position :],
        }


def before_epoch(
    loader: Arguments, number: int, workers: tuple[int, int], last: Cursor | None, streams: Sequence[StreamState]
) -> s.State:
    """Returns the state of a loader whose epoch ``number`` has not begun.

    ``workers`` is the seed of workers that stay, and the epoch in which they started; ``last`` is where the epoch
    before stands, if there was one; ``streams`` is where the data sets that the epoch iterates stand, if that is known.
    """
    sampling = Sampling(loader)
    generators = {role: g for role, g in sampling.generators.items() if role != "default"}
    own = states_between(sampling, None if last is None else last.epoch.order)
    seed, first = workers
    out: s.State = {
        **s.header("map", number, (0, seed % (1 << 64), first), begun=False),
        "generators": packed_states(generators),
        "progress": s.plain_positions(DeliveredPositions()),
        "source": {
            "state": {"iterator": None, **own},
            "rank": ranks.rank_of(sampling),
            **(plain_between(streams) if sampling.iterable else {}),
        },
    }
    if global_generator.concerns(loader, sampling):
        out["global"] = global_generator.plain()
    return out
