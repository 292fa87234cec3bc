"""Where a loader stands: from a running epoch to a state.

A ``EpochProgress`` is made with every epoch's iterator, and asked by ``DataLoader.state_dict``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint import process_generators, ranks
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.cursor import Cursor, told_between
from minato_gpu.checkpoint.positions import plain_positions
from minato_gpu.checkpoint.streams import MOST_READ_AGAIN, between, plain_streams
from minato_gpu.lanes.streams import StreamState
from minato_gpu.packing import packed_states
from minato_gpu.sampling.delivered import HISTORY, DeliveredPositions
from minato_gpu.sampling.orders import REPLAY
from minato_gpu.sampling.samplers import Sampling, length_of
from minato_gpu.sampling.sources import Source


class EpochProgress:
    """One epoch of a loader, since it began. ``workers``: the seed of those that persist and the epoch in which they
    started; else the epoch's own are theirs. ``gone``: of the whole order, before it was dealt out to these ranks.
    ``globals_at_start``: how the process's generators stood then, for a stream that draws here."""

    def __init__(
        self, loader: Arguments, source: Source, workers: tuple[int, int] | None = None, gone: s.State | None = None
    ) -> None:
        self.source = source
        self.over = False  # the iterator has said so
        self.globals_at_start: s.State | None = None
        self._seeds = (source.seed, *(workers or (source.seed, source.number)))
        self._sampling = Sampling(loader)
        expected = self._sampling.expected
        # samples of the epoch that are left, where the sampler tells
        self.expected = None if expected is None or gone is not None else max(0, expected - source.delivered.samples)
        self._most_again = most_drawn_again(loader)
        self._cursor = Cursor(self._sampling, source, gone)
        self._globals = process_generators.concerning(loader, self._sampling)
        self._asked = b""  # torch's global generator before the batch that is asked for
        self._before: deque[bytes] = deque(maxlen=HISTORY)  # and before each of the last that were delivered

    def asked(self) -> None:
        """The next batch is about to be taken, or to be fetched here."""
        if self._globals and (state := process_generators.torch_now()) != self._asked:  # few of them, mostly
            self._asked = state

    def delivered(self, batch: Sequence[tuple[int, int]], failed: int = 0, *, returned: bool = True) -> None:
        """The consumer has this batch: its positions, or the ticket of a stream. For the rest see ``Delivered.add``."""
        with self.source.lock:
            if returned or self.source.streams is not None:
                self._before.append(self._asked)
            if self.source.streams is not None:
                self.source.streams.delivered(batch[0][0])
            else:
                self.source.delivered.add(batch, failed, returned=returned)

    @property
    def batches(self) -> int:
        """How many of the epoch the consumer has, or had in an earlier run; those that were left out count too."""
        return self.source.delivered.batches if self.source.streams is None else self.source.streams.batches

    @property
    def ended_with_batches(self) -> bool:
        """Whether the epoch is over, and a stream has yielded any."""
        streams = self.source.streams
        return self.over and streams is not None and streams.batches > 0

    def state(self, ahead: int) -> s.State:
        """The state of the epoch, as it was ``ahead`` batches ago, for whichever thread. Raises ValueError where that
        cannot be told."""
        with self.source.lock:
            return self._state(ahead)

    def _state(self, ahead: int) -> s.State:
        source, streams = self.source, self.source.streams
        out = s.header("map" if streams is None else "iterable", source.number, self._seeds, begun=True)
        if streams is not None:
            out["source"] = {**self._sampling.cutting, **plain_streams(streams, ahead, self._sampling.size or 1)}
            if self.globals_at_start is not None and out["source"]["streams"][0]["state"] is None:
                out["source"]["global"] = self.globals_at_start
        else:
            delivered = source.delivered.rewound(ahead)
            if source.order.way == REPLAY:
                check_drawn_again(delivered.low, self._most_again)
            out.update(progress=plain_positions(delivered), source=self._cursor.plain(delivered))
        out["generators"] = dict(source.order.generator_states())  # after all keys that are stored have been drawn
        if self._globals:
            before = {process_generators.TORCH: self._before[-ahead]} if ahead else None
            out["global"] = process_generators.plain(before or process_generators.now(self._globals))
        return out


def most_drawn_again(loader: Arguments) -> int:
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
    loader: Arguments, number: int, workers: tuple[int, int], last: EpochProgress | None, streams: Sequence[StreamState]
) -> s.State:
    """The state of a loader whose epoch ``number`` has not begun.

    ``workers``: the seed of those that stay, and the epoch in which they started; ``last``: where the epoch before
    stands, if there was one; ``streams``: where the data sets that the epoch iterates stand, where that is known.
    """
    sampling = Sampling(loader)
    generators = {role: g for role, g in sampling.generators.items() if role != "default"}
    own = told_between(sampling, None if last is None else last.source.order)
    drawn_from = process_generators.concerning(loader, sampling)
    outside = {"global": process_generators.plain(process_generators.now(drawn_from))} if drawn_from else {}
    seed, epoch = workers
    return {
        **s.header("map", number, (0, seed % (1 << 64), epoch), begun=False),
        "generators": packed_states(generators),
        "progress": plain_positions(DeliveredPositions()),
        "source": {
            "state": {"iterator": None, **own},
            "rank": ranks.rank_of(sampling),
            **(between(streams) if sampling.iterable else {}),
        },
        **outside,
    }
