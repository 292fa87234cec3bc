"""``num_workers=0``: batches are prepared on the consumer's thread when it asks for them, as PyTorch does it.

Loaders with workers and without share the code that delivers a batch and handles samples that fail (delivery.py), and
the code that prepares one sample (lanes/produce.py). This module takes the place of an engine.

Nothing is seeded here but the pipeline's own draws: the main process's generators behave as PyTorch leaves them.

Decision: no lane behind an engine. Tried, with one slot whose worker runs where the consumer would sleep: 64 trivial
samples then take 280 to 610 microseconds a batch instead of 130, since tickets, leases and events are there for a
choice that does not exist here; and each ``iter()`` takes 2 milliseconds, for arenas and bells that nobody else uses.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NoReturn

from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe
from torch.utils.data.graph_settings import apply_sharding

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint.cursor import Cursor
from minato_gpu.checkpoint.resumption import Resumption, begin_epoch
from minato_gpu.epoch.delivery import EpochIterator
from minato_gpu.epoch.session import Session
from minato_gpu.lanes.base import Failure, NoSample, Piece, Task
from minato_gpu.lanes.produce import Job, Producer
from minato_gpu.lanes.streams import Stream
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.samples import Ticket, Value, add_note
from minato_gpu.sampling.epoch_batches import EpochBatches
from minato_gpu.sampling.worker_streams import WorkerStreams
from minato_gpu.window.contract import NOTHING, Batches, EndOfEpoch, Judge


class InlineIterator(EpochIterator):
    """The iterator of one epoch in the main process (``num_workers=0``)."""

    def __init__(self, loader: Arguments, session: Session, epoch: int, resumption: Resumption | None) -> None:
        begun = resumption is not None and resumption.begun
        super().__init__(loader, session.base_seed if begun else None)
        if loader.timeout != 0:
            raise AssertionError("timeout == 0 is expected with num_workers=0: there is no worker to wait for")
        cursor, batches = self._begin(loader, session, epoch, resumption)
        if resumption is not None and isinstance(batches, StreamHere):
            resumption.globals.put_again()  # the stream may have drawn as it was opened
        session.cursor = cursor
        self._deliver(session.options, batches, cursor)

    def _begin(
        self, loader: Arguments, session: Session, number: int, resumption: Resumption | None
    ) -> tuple[Cursor, Batches]:
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            apply_sharding(self._dataset, self._world_size, self._rank)
        log = Telemetry(perf_counter(), number, session.facts)
        log.lanes["cpu"].slots = 1
        cursor = begin_epoch(loader, number, self._base_seed, self._sampler_iter, resumption)
        epoch = cursor.epoch
        log.began(cursor.expected, log.begin)
        job = Job.of(loader, epoch.seed, seeds_samples=False, skips=session.options.skips)
        if epoch.streams is None:
            return cursor, SamplesHere(job, epoch, log, asks_once=loader.on_error == "raise")
        if resumption is None:
            epoch.streams.begin(session.streams_between(loader), session.left_here(loader))
        epoch.streams.share_seed(self._shared_seed, self._dataset)
        return cursor, StreamHere(job, epoch.streams, log)


class StreamHere(Batches):
    """Batches of an iterable data set that is iterated in the main process.

    Implements ``Batches``; no sample is left out.
    """

    def __init__(self, job: Job, streams: WorkerStreams, log: Telemetry) -> None:
        """``streams``: where the one stream begins; updated as it advances.

        Raises ValueError where a saved state cannot be taken up (see ``Stream``), or the stream, read again to get
        there, draws from a global generator.
        """
        start = streams.starts[0] if streams.starts else None
        # a stream that had ended when it was saved is not opened: its saved state is where the next epoch begins
        self._stream = stream = None if streams.left else Stream(job, start)
        if stream is not None and not stream.ended and stream.drew:
            raise ValueError(
                "the state cannot be taken up: its iterable data set has no state of its own, so that it is read "
                f"again, and draws from {min(stream.drew)}'s global generator, so that others would come. Give the "
                "data set, or its iterator, state_dict() and load_state_dict(), or a generator of its own; or pass "
                "num_workers=1, as a worker's generators begin alike"
            )
        self._streams = streams
        self.log = log

    def next(self, number: int, judge: Judge, asked: Callable[[], None]) -> Value:
        """Returns the next batch. Raises EndOfEpoch at the stream's end, and the stream's errors as they are."""
        begin = perf_counter()
        self.delivered = None
        asked()
        if (stream := self._stream) is None:
            self.log.ended(begin)
            raise EndOfEpoch
        try:
            batch = stream.fetch()
        except StopIteration:
            self.log.ended(perf_counter())
            raise EndOfEpoch from None
        except BaseException as error:  # nobody knows how far into the batch
            self._taken(stream)
            if isinstance(error, Exception):
                self.log.in_vain(stream.size - 1)
                self.log.lost(1, stream.size - 1)
            raise
        self._taken(stream)
        self.log.inline(begin, perf_counter(), self._streams.batches, stream.size)
        return batch

    def _taken(self, stream: Stream) -> None:
        """Notes how far the stream has come with this batch."""
        ticket = self._streams.batches
        self.delivered = [(ticket, ticket + 1)]
        self._streams.told[ticket] = stream.told()
        self._streams.turns[ticket] = 0


class SamplesHere(Batches):
    """Batches of a map-style data set, prepared in the main process. Implements ``Batches``.

    An error keeps its type, text and traceback, as in PyTorch, and gets a note that says where it happened. With
    ``asks_once``, what ``__getitems__`` returns is collated as it is, and what it raises is raised, as by PyTorch.
    """

    def __init__(self, job: Job, epoch: EpochBatches, log: Telemetry, *, asks_once: bool) -> None:
        self._job, self._collate, self._batched = job, job.collate_fn, job.auto_collation
        self._epoch = epoch
        self._producer = Producer(0, job)
        self._task = Task(0, 0, "run", epoch.number, epoch.seed)
        self._many = job.dataset.__getitems__ if asks_once and self._producer.fetches_many(self._task) else None
        self.log = log

    def next(self, number: int, judge: Judge, asked: Callable[[], None]) -> Value:
        """Returns the next batch without samples that are left out; NOTHING if none remains (see ``Batches``).

        Raises EndOfEpoch at the sampler's end.
        """
        begin = perf_counter()
        self.delivered = self.last_good = None
        drawn = self._epoch.draw()
        if drawn is None:
            self.log.ended(perf_counter())
            raise EndOfEpoch
        self.delivered = [(drawn.positions[0], drawn.positions[-1] + 1)]
        asked()
        keys = [] if isinstance(drawn.keys[0], NoSample) else drawn.keys  # none if the sampler yielded an empty batch
        piece = Piece(drawn.positions[0], keys, drawn.occurrences, joins=True)
        samples, bad = self._samples(piece)
        good = len(piece.keys) - len(bad)
        try:
            if bad:
                judge(bad, good)
                if not good:
                    return NOTHING
            batch = self._of_all("collate", piece, good, samples if self._batched else samples[0], self._collate)
        except Exception:
            self.log.in_vain(good)
            raise
        self.log.inline(begin, perf_counter(), self._epoch.delivered.batches, good, positions=self.delivered)
        return batch

    def _samples(self, piece: Piece) -> tuple[Value, list[Failure]]:
        """Returns the samples of a batch, or what ``__getitems__`` returned, and failures that may be left out."""
        if self._many is not None:
            return self._of_all("__getitems__", piece, len(piece.keys), list(piece.keys), self._many), []
        produce = self._producer.of(self._task, piece, False)
        samples: list[Value] = []
        bad: list[Failure] = []
        # no generator expression: in one, a sample that raised StopIteration would be reported without its index
        for at in range(len(piece.keys)):
            try:
                samples.append(produce(at))
                last = at
            except Exception as error:
                if not self._job.skips:
                    self._raise(piece, at, error, len(samples))
                bad.append(self._producer.failure(self._task, piece, at, error))
        if samples and self._job.skips:
            occurrence = 0 if piece.occurrences is None else piece.occurrences[last]
            self.last_good = Ticket(self._task.epoch, piece.position_of(last), piece.keys[last], occurrence)
        return samples, bad

    def _raise(self, piece: Piece, at: int, error: Exception, prepared: int) -> NoReturn:
        """Raises a sample's error, which ends its batch; ``prepared`` others were finished before it."""
        cause, origin = self._producer.explained(self._task, piece, at, error)
        add_note(cause, str(origin))
        self.log.in_vain(prepared)
        self.log.lost(1, len(piece.keys) - 1)
        if cause is error:
            raise error
        raise cause from cause.__cause__

    def _of_all(
        self, what: str, piece: Piece, samples: int, argument: Value, function: Callable[[Value], Value]
    ) -> Value:
        """Returns what a function of the user's makes of a batch of so many samples.

        An error of it gets a note of which batch it is, and is counted.
        """
        try:
            return function(argument)
        except Exception as error:
            place = f"positions {piece.position} to {piece.position + len(piece.keys) - 1}, indices {piece.keys}"
            add_note(error, f"{what}, epoch {self._task.epoch}, {place}")
            self.log.lost(1, max(0, samples - 1))
            raise
