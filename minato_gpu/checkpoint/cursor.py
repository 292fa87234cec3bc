"""The position of an epoch, and the plain data that ``DataLoader.state_dict`` is made of.

A state holds what was delivered and one snapshot of what yields the samples (sampling/order.py): the generators as the
epoch began; or the keys that are drawn and not delivered, with the sampler's own state after them (or all keys that are
left); or the states of an iterable data set's streams. A resume goes back there and drops what was delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint import global_generator, ranks
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.streams import plain_between, plain_streams
from minato_gpu.lanes.streams import StreamState
from minato_gpu.samples import JSON, witness_of
from minato_gpu.sampling.delivered_positions import HISTORY, DeliveredPositions
from minato_gpu.sampling.epoch_batches import EpochBatches, KeptBatch
from minato_gpu.sampling.order import KEYS, REPLAY, states_between
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
        """``workers``: base seed of persistent workers, and number of the epoch in which they started; None: the
        epoch's own.

        ``gone``: after a resume with another number of ranks, what had been delivered of the whole order, as
        ``ranks.gone_of`` returns it; None: nothing.
        """
        self.epoch = epoch
        self.over = False  # the epoch has ended
        self._seeds = (epoch.seed, *(workers or (epoch.seed, epoch.number)))
        self._sampling = Sampling(loader)
        expected = self._sampling.expected
        # samples of the epoch that are left, where the sampler tells
        self.expected = None if expected is None or gone is not None else max(0, expected - epoch.delivered.samples)
        self._gone = gone
        self._plain: dict[int, JSON] = {}  # kept batches as plain data, by place
        self._rest: list[JSON] | None = None  # what follows them, once the sampler has ended
        self._saves_global = global_generator.concerns(loader, self._sampling)
        self._asked = b""  # state of torch's global generator before the batch that is asked for
        self._before: deque[bytes] = deque(maxlen=HISTORY)  # and before each of the last delivered batches

    def asked(self) -> None:
        """Records the state of torch's global generator, as the next batch is about to be taken or, without workers,
        prepared. Does nothing where states do not hold it."""
        # states are large and mostly equal: keep one object for all equal ones
        if self._saves_global and (state := global_generator.now()) != self._asked:
            self._asked = state

    def delivered(self, batch: Sequence[tuple[int, int]], failed: int = 0, *, returned: bool = True) -> None:
        """Notes that the consumer has a batch, or has dealt with it otherwise (``returned`` False). ``batch``: its
        positions as half-open spans; of a stream's batch one span that begins with its ticket. For the other
        arguments, which streams ignore, see ``DeliveredPositions.add``."""
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
        """The number of the epoch's batches that were delivered, left out or raised, those of an earlier run
        included."""
        return self.epoch.delivered.batches if self.epoch.streams is None else self.epoch.streams.batches

    @property
    def ended_with_batches(self) -> bool:
        """True if the epoch is over and any stream of an iterable data set has yielded a batch; False for a map-style
        data set."""
        streams = self.epoch.streams
        return self.over and streams is not None and streams.batches > 0

    def state(self, ahead: int) -> s.State:
        """Returns the state of the epoch as it was ``ahead`` batches ago (0: as it is). May be called by any thread;
        may draw keys from the sampler.

        Raises ValueError if that is too far back, or if the sampler, its keys or the streams cannot be saved; and what
        the sampler raises if this asks it for keys.
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
            begun = order.begun_from
            source.update(witness=epoch.witness, order_drawn=begun is not None, gone=self._gone and self._gone.copy())
            generators = packed_states(sampling.generators) if begun is None else dict(begun)
        else:
            found, generators = self._stored(epoch.since(delivered.low))
            source.update(found)
        return {"progress": s.plain_positions(delivered), "source": source, "generators": generators}

    def _stored(self, kept: list[KeptBatch]) -> tuple[s.State, dict[str, str]]:
        """Returns, of an order that cannot be replayed, the entries of 'source' (keys that are drawn and not delivered,
        the sampler's state after them), and the generators' states then, by role.

        ``kept``: the batches that the epoch has drawn, and that are not delivered. Draws the next batch from the
        sampler, or all that is left where it has no state.
        """
        epoch, order = self.epoch, self.epoch.order
        if order.way == KEYS and not order.ended:
            order.draw_rest()
        snapshot = order.snapshot()
        first: KeptBatch | EpochBatches = kept[0] if kept else epoch
        self._plain = {batch.place: self._plain.get(batch.place) or s.plain_batch(batch.keys) for batch in kept}
        counts, others = epoch.occurrences.stored()
        out: s.State = {
            "place": first.place,
            "position": first.position,
            "drawn": [*self._plain.values(), *self._coming()],
            "occurrences": [batch.occurrences for batch in kept],
            "counts": list(map(packed, counts)),
            "others": [[s.plain_key(key), count] for key, count in others.items()],
            "state": snapshot.own.copy(),
            "ended": order.ended,
        }
        if snapshot.following:
            out["witness"] = witness_of(self._sampling.keys_of(*snapshot.following))
        return out, {role: packed_state(state) for role, state in snapshot.generators.items()}

    def _coming(self) -> list[JSON]:
        """Returns the batches that the order has drawn, and not yet the epoch, as plain data."""
        order = self.epoch.order
        if self._rest is None or not order.ended:
            self._rest = [s.plain_batch(self._sampling.keys_of(item)) for item in order.coming]
        return self._rest[len(self._rest) - len(order.coming) :]


def before_epoch(
    loader: Arguments, number: int, workers: tuple[int, int], last: Cursor | None, streams: Sequence[StreamState]
) -> s.State:
    """Returns the state of a loader whose epoch ``number`` has not begun.

    ``workers``: base seed of workers that stay, and number of the epoch in which they started. ``last``: where the
    epoch before stands (None: there was none). ``streams``: where each worker's data set stands (empty: not known).
    Raises ValueError if a data set could not tell its state.
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
