"""``num_workers=0``: PyTorch's own single-process iterator, with the pipeline's stages and the counters added.

Nothing is seeded here but the pipeline's own draws: the main process's generators behave as PyTorch leaves them.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _SingleProcessDataLoaderIter
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe
from torch.utils.data.graph_settings import apply_sharding

from minato_gpu.admission.sources import Drawn, Source
from minato_gpu.engine import NOTHING
from minato_gpu.faults.failures import RAISE, RETRY, FailurePolicy, pads_batches
from minato_gpu.lanes.base import Failure, NoSample, failure, reraise
from minato_gpu.lanes.streams import Stream, StreamStart
from minato_gpu.resume import process_generators
from minato_gpu.resume.resumption import Resumption, begin_source, expected_of
from minato_gpu.resume.standing import is_iterable, told_here
from minato_gpu.samples import Origin, Ticket, add_note, explain, sample_seed
from minato_gpu.telemetry import Telemetry, size_of


class _Fetcher:
    """Fetches samples as PyTorch's fetcher for map-style data sets does, through the pipeline if there is one.

    An error keeps its type and text, as in PyTorch, and gets a note that says where it happened.
    """

    def __init__(self, loader: Any, seed: int, epoch: int) -> None:
        self._loader = loader
        self._seed = seed
        self._epoch = epoch
        self.drawn: Drawn | None = None  # what is fetched next
        self.size = 0  # samples of the last batch
        self.bad: list[Failure] = []  # those that were left out of it
        self.survivor: tuple[Ticket, Any] | None = None  # the last that was not, where some may be
        many = getattr(loader.dataset, "__getitems__", None)
        self._many = many if many and loader._auto_collation and loader.pipeline is None else None

    def fetch(self, keys: Any) -> Any:
        """One batch."""
        batched = self._loader._auto_collation
        keys = list(keys) if batched else [keys]
        self.size = len(keys)
        assert self.drawn is not None
        first, occurrences = self.drawn.positions[0], self.drawn.occurrences or [0] * len(keys)
        samples, last = self._together(keys), len(keys) - 1
        if samples is None:
            # no generator: there a data set's StopIteration would become a RuntimeError that names no index
            samples = [self._one(first + at, key, occurrences[at]) for at, key in enumerate(keys)]
        if self.bad:
            last = max((at for at, sample in enumerate(samples) if sample is not NOTHING), default=-1)
            samples = [sample for sample in samples if sample is not NOTHING]
        self.size = len(samples)
        if not samples and self.bad:
            return NOTHING
        if self._loader._options.skips and keys:
            self.survivor = (Ticket(self._epoch, first + last, keys[last], occurrences[last]), samples[-1])
        try:
            return self._loader.collate_fn(samples if batched else samples[0])
        except Exception as error:
            end = first + len(keys) - 1
            add_note(error, f"collate, epoch {self._epoch}, positions {first} to {end}, indices {keys}")
            raise

    def again(self, ticket: Ticket) -> Any:
        """A batch of this sample alone. What a data set draws without a pipeline is only the same if it is at hand."""
        at_hand = self.survivor is not None and self.survivor[0] == ticket and self._loader.pipeline is None
        sample = self.survivor[1] if at_hand and self.survivor else self._sample(ticket.index, ticket.occurrence)
        return self._loader.collate_fn([sample] if self._loader._auto_collation else sample)

    def succeeds(self, ticket: Ticket) -> bool:
        """Whether this sample of a batch to come can be prepared; if not, it is told when it is due."""
        try:
            self.survivor = (ticket, self._sample(ticket.index, ticket.occurrence))
        except Exception:
            return False
        return True

    def _together(self, keys: list[Any]) -> list[Any] | None:
        """All samples by one ``__getitems__``; None where they must be fetched one by one."""
        if not self._many:
            return None
        if self._loader.on_error == RAISE:
            return list(self._many(keys))
        try:
            samples = list(self._many(keys))
        except Exception:
            return None  # one by one, to find the sample that it raises for
        return samples if len(samples) == len(keys) else None

    def _one(self, position: int, key: Any, occurrence: int) -> Any:
        tries = 2 if self._loader.on_error == RETRY else 1
        while True:
            tries -= 1
            try:
                return self._sample(key, occurrence)
            except Exception as error:
                if tries:
                    continue
                cause, origin = explain(error, Origin(self._epoch, position, key, lane="cpu"))
                if self._loader._options.skips:
                    self.bad.append(failure(cause, f"in the main process ({origin})", origin=origin))
                    return NOTHING
                add_note(cause, str(origin))
                if cause is error:
                    raise
                raise cause from cause.__cause__

    def _sample(self, key: Any, occurrence: int) -> Any:
        value = self._loader.dataset[key] if not self._many else self._many([key])[0]
        if self._loader.pipeline is None:
            return value
        return self._loader.pipeline.run(value, sample_seed(self._seed, 0, key, occurrence))


def tickets_of(epoch: int, drawn: Drawn) -> list[Ticket]:
    """What the sampler asked for, one by one."""
    occurrences = drawn.occurrences or [0] * len(drawn.keys)
    return [Ticket(epoch, *each) for each in zip(drawn.positions, drawn.keys, occurrences, strict=True)]


class InlineIterator(_SingleProcessDataLoaderIter):
    """One epoch in the main process."""

    def __init__(self, loader: Any, epoch: int, resumption: Resumption | None = None) -> None:
        begun = resumption is not None and resumption.begun
        generator = torch.default_generator if loader.generator is None else loader.generator
        before = generator.get_state() if begun else None
        at_start = process_generators.every() if is_iterable(loader) and not begun else None
        rewound = resumption is not None and begun and resumption.globals.rewind()  # a stream may draw as it begins
        first = None if begun or not is_iterable(loader) else told_here(loader, resumption.starts if resumption else [])
        _BaseDataLoaderIter.__init__(self, loader)  # its subclass's would iterate the data set before it has its state
        if self._timeout != 0:
            raise AssertionError("timeout == 0 is expected with num_workers=0: there is no worker to wait for")
        if before is not None:
            if not rewound or loader.generator is not None:
                generator.set_state(before)
            self._base_seed = loader._base_seed
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            apply_sharding(self._dataset, self._world_size, self._rank)
        self.log = Telemetry(None, perf_counter())
        self.log.lanes["cpu"].slots = 1
        self._loader = loader
        self._epoch = epoch
        self._failed: list[tuple[int, int]] | None = None
        self._source: Source | None = None
        self._drawn: Drawn | None = None
        self._drawn_ahead: deque[Drawn | None] = deque()
        self._pads = pads_batches(loader)
        self._padded = 0  # samples of the batch that is about to be delivered which repeat others
        self._stream: Stream | None = None
        source, standing = begin_source(loader, epoch, int(self._base_seed), self._sampler_iter, resumption)
        if source.streams is not None:
            source.streams.share_seed(self._shared_seed, self._dataset)
            if first is not None:
                source.streams.begin([first])
            self._dataset_fetcher: Any = self._begin_stream(loader, source.starts if begun else [])
            if source.streams.ended:
                self._dataset_fetcher.ended = True
            if at_start is not None:
                standing.globals_at_start = process_generators.plain(at_start)
            elif resumption is not None:
                resumption.globals.put_again()  # what was read again has drawn from them
        else:
            self._source = source
            if isinstance(self._dataset, MapDataPipe):
                of = self._dataset, self._auto_collation, self._collate_fn, self._drop_last
                self._dataset_fetcher = _DatasetKind.create_fetcher(self._dataset_kind, *of)
            else:
                self._dataset_fetcher = _Fetcher(loader, source.seed, epoch)
        self._num_yielded = source.delivered.batches if source.streams is None else source.streams.batches
        self.log.expected = expected_of(loader, source, resumption)
        limits = loader.on_error, loader.max_failures, loader._expected()
        self.failures = FailurePolicy(*limits, self.log, source.delivered)
        loader._standing = self._standing = standing

    def __len__(self) -> int:
        """Batches of an epoch, as its loader has it. PyTorch asks the sampler, which knows of no rounds of devices."""
        return len(self._loader) if self._dataset_kind == _DatasetKind.Map else int(super().__len__())

    def _begin_stream(self, loader: Any, starts: list[StreamStart]) -> Any:
        """The fetcher of an iterable data set, which goes on where an earlier run left it."""
        samples = loader.batch_size or 1
        over, loader._over = loader._over, None
        if starts:
            self._stream = Stream.open(loader, starts[0], samples)
            loader._over = (self._stream.before or b"") if starts[0].over else None
        elif over is not None:
            self._stream = Stream.open(loader, StreamStart(0, None, over=True), samples, before=over)
        else:
            self._stream = Stream.open(loader, None, samples)
        return self._stream.fetcher

    def _next_index(self) -> Any:
        keys = self._next_keys()
        self._standing.asked()  # what the sampler draws is no part of what fetching the batch once more draws
        return keys

    def _next_keys(self) -> Any:
        if self._source is None:
            return super()._next_index()  # type: ignore[no-untyped-call]
        self._drawn = None  # should the sampler raise
        self._drawn = self._drawn_ahead.popleft() if self._drawn_ahead else self._source.draw()
        if self._drawn is None:
            raise StopIteration
        if isinstance(self._dataset_fetcher, _Fetcher):
            self._dataset_fetcher.drawn = self._drawn
        keys = [] if isinstance(self._drawn.keys[0], NoSample) else self._drawn.keys
        return keys if self._auto_collation else keys[0]

    def _next_data(self) -> Any:
        begin = perf_counter()
        self._settle_failed()
        try:
            data = self._next_batch()
            now = perf_counter()
            number = self._num_yielded if self._source is None else self._source.delivered.batches
            data = self._loader._to_device(data, number)
        except StopIteration as error:
            if self._drawn is not None:  # not the sampler's end: a sample's, say, which would end the epoch in silence
                self._failed = self._positions()
                raise RuntimeError(self._said_by(error)) from error
            self.log.end = perf_counter()
            self._standing.over = True
            raise
        except BaseException:
            self._failed = self._positions()
            raise
        fetcher = self._dataset_fetcher
        size = fetcher.size if isinstance(fetcher, _Fetcher) else size_of(data)
        padded, self._padded = self._padded, 0
        self.log.inline(self._epoch, begin, now, size, padded)
        if self._source is not None:
            known = fetcher.survivor if isinstance(fetcher, _Fetcher) and self._pads and not padded else None
            self._standing.delivered(self._positions(), None if known is None else known[0], self.failures.count)
        elif self._stream is not None:
            self._standing.told(self._stream.told(exactly=self._standing.saves_come))
        return data

    def _said_by(self, error: StopIteration) -> str:
        """What raised it, in words: the sample or the batch, as a note says, or all that may have."""
        assert self._drawn is not None
        where = getattr(error, "__notes__", ())
        where = where[-1] if where else f"epoch {self._epoch}, indices {self._drawn.keys}"
        return f"StopIteration in the main process ({where}): {error}".removesuffix(": ")

    def _settle_failed(self) -> None:
        """The consumer goes on after an error: what raised it counts as dealt with, and a resume leaves it out."""
        failed, self._failed = self._failed, None
        if failed and self._source is not None:
            self._standing.delivered(failed, failed=self.failures.count, returned=False)
        elif failed is not None and self._stream is not None:
            self._standing.told(self._stream.told())

    def _next_batch(self) -> Any:
        """The next batch of which anything is left, or which ranks must have all the same."""
        fetcher = self._dataset_fetcher
        while True:
            data = super()._next_data()  # type: ignore[no-untyped-call]
            if isinstance(fetcher, _Fetcher) and fetcher.bad:
                bad, fetcher.bad = fetcher.bad, []
                self.log.failed += len(bad)
                try:
                    self.failures.take(bad, fetcher.size)
                except BaseException:
                    self.log.skipped += fetcher.size
                    raise
                if data is NOTHING and self._pads:
                    data = self._repeat(fetcher)
                    if data is NOTHING:  # no sample of this rank is left to repeat
                        reraise(bad[0].error)
            if data is not NOTHING:
                return data
            assert self._source is not None
            self._standing.delivered(self._positions(), failed=self.failures.count, returned=False)

    def _repeat(self, fetcher: _Fetcher) -> Any:
        """A batch of one sample for the last, which has lost all of its own: see failures.py."""
        assert self._source is not None
        ticket = self._source.delivered.survivor or self._next_survivor(fetcher)
        if ticket is None:
            return NOTHING
        data, self._padded = fetcher.again(ticket), 1
        return pin_memory(data, self._pin_memory_device) if self._pin_memory else data

    def _next_survivor(self, fetcher: _Fetcher) -> Ticket | None:
        """The first sample of the batches to come that can be prepared."""
        assert self._source is not None
        seen = 0
        while True:
            if seen == len(self._drawn_ahead):
                self._drawn_ahead.append(self._source.draw())
            drawn = self._drawn_ahead[seen]
            if drawn is None:
                return None
            for ticket in tickets_of(self._epoch, drawn):
                if not isinstance(ticket.index, NoSample) and fetcher.succeeds(ticket):
                    return ticket
            seen += 1

    def _positions(self) -> list[tuple[int, int]]:
        """Of the batch that was drawn last; strict order, so they are neighbours."""
        if self._drawn is None:
            return []
        first = self._drawn.positions[0]
        return [(first, first + len(self._drawn.keys))]

    def memory(self) -> dict[str, Any]:
        """There is no memory in flight, and nothing was predicted."""
        nothing = {"samples": 0, "log_sigma": None, "rank_correlation": None}
        return {"prediction": nothing, "bytes_in_flight": 0, "bytes_in_flight_peak": 0}
