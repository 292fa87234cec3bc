"""Preparation of one sample by a worker: from the data set, with the sample's seeds, through the pipeline's stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import perf_counter

from torch._utils import ExceptionWrapper
from torch.utils.data import default_collate, default_convert

from minato_gpu.arguments import Arguments
from minato_gpu.lanes.base import Begun, Draws, Failure, Features, Handed, Part, Piece, Stored, Task, failure, reraise
from minato_gpu.lanes.field_keeper import FieldKeeper
from minato_gpu.lanes.seeding import Seeder
from minato_gpu.lanes.sharing import Sharing
from minato_gpu.lanes.store import Store
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.samples import Origin, StageError, Value, explain, sample_seed, stage_seed
from minato_gpu.scheduling.messages import CPU
from minato_gpu.sources.reading import AT_HAND, Place

Produce = Callable[[int], Value]
"""A function from an offset in the piece to the prepared sample."""


@dataclass
class Job:
    """The data set, functions and rules that a worker needs for its whole life; picklable where the start method
    pickles."""

    dataset: Value
    collate_fn: Callable[[Value], Value]
    auto_collation: bool
    drop_last: bool
    pipeline: Pipeline | None
    worker_init_fn: Callable[[int], None] | None
    num_workers: int
    base_seed: int
    seeds_samples: bool  # process workers seed the global generators per sample; threads share them
    skips: bool = False  # a batch is delivered without the samples that failed
    retries: bool = False  # a sample that raised is tried once more, with the same draws
    cuts: tuple[int, ...] = ()  # the stages before which a sample may be handed over to another lane
    repeats: bool = False  # a worker that dies is replaced: others do again what it had begun
    lane: str = CPU  # name of the lane, for errors
    in_order: bool = False  # a batch waits for all of its samples: none is of use before the others
    batch_size: int = 1  # samples of a batch of a stream
    snapshot_every: int = 1  # batches between two states that a stream tells
    epochs_before: int = 0  # epochs that streams of workers with this base seed, which were not kept, have gone through

    @classmethod
    def of(
        cls,
        loader: Arguments,
        base_seed: int,
        worker_init_fn: Callable[[int], None] | None = None,
        *,
        seeds_samples: bool,
        workers: int | None = None,
        **more: Value,
    ) -> Job:
        """Makes the job of what the loader's arguments say. ``workers``: how many there are, if not ``num_workers``."""
        batched = loader.batch_sampler is not None
        given = loader.dataset, loader.collate_fn, batched, loader.drop_last, loader.pipeline, worker_init_fn
        retries = loader.on_error == "retry"
        count = loader.num_workers if workers is None else workers
        every = max(1, loader.snapshot_every_n_steps or 1)
        more |= {"retries": retries, "snapshot_every": every, "batch_size": loader.batch_size or 1}
        return cls(*given, count, base_seed, seeds_samples, **more)

    @property
    def own_collate(self) -> bool:
        """True if the ``collate_fn`` is one of the user's: it may draw, and keep samples.

        Compared as objects: its own comparison is the user's code.
        """
        return self.collate_fn is not default_collate and self.collate_fn is not default_convert


class KnownFailure(Exception):
    """The host read of this sample has failed already; ``failure`` says how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


class Producer:
    """Prepares samples from the data set of one worker (or of the training process, without workers), with seeding."""

    def __init__(
        self, number: int, job: Job, store: Store | None = None, on_stage: Callable[[int], None] = lambda stage: None
    ) -> None:
        """``on_stage`` is called with the stage's number before each stage of the pipeline, and with -1 before the data
        set. ``store``: where parts of samples are stored that go from lane to lane."""
        worker = f"in DataLoader worker {'process' if job.seeds_samples else 'thread'} {number}"
        self.who = worker if job.num_workers else "in the main process"
        self._job = job
        self._store = store
        # whether the current sample is to go to another lane before this stage
        self.handing_over: Callable[[int], bool] = lambda cut: False
        self.keeping: FieldKeeper | None = None  # keeps fields, where that is possible
        self.sharing: Sharing | None = None  # shares samples with other loaders, where that is possible
        self._on_stage = on_stage
        self.seeder = Seeder(job.base_seed, number, job.epochs_before) if job.seeds_samples else None
        self._init_error: ExceptionWrapper | None = None
        many = getattr(job.dataset, "__getitems__", None)
        pipeline = job.pipeline
        self._wanted: dict[int, frozenset[str]] = {}  # fields that a stage and those after it need, by stage
        if pipeline is not None:
            self._wanted = {cut: pipeline.live(cut) | {"path"} for cut in (pipeline.host_prefix, *job.cuts)}
        self._part: Part | None = None
        self._getitems = many if callable(many) and job.auto_collation and job.pipeline is None else None
        if job.worker_init_fn is not None:
            self._initialise(job.worker_init_fn, number)

    def _initialise(self, init: Callable[[int], None], number: int) -> None:
        try:
            init(number)
        except Exception:
            self._init_error = ExceptionWrapper(where=self.who)
        if self.seeder is not None:
            self.seeder.after_init_fn()

    def check_started(self) -> None:
        """Raises what ``worker_init_fn`` raised."""
        if self._init_error is not None:
            reraise(self._init_error)

    def begin_unseeded(self, task: Task, samples: int) -> bool:
        """Returns whether a chunk of this many samples may try without seeding (see seeding.py): if it can be done
        again from the data set on, nothing of the first try is kept, and samples are not expected to draw."""
        if (
            self.seeder is None
            or self._init_error is not None
            or self.keeping is not None
            or self.sharing is not None
            or any(piece.sources is not None for piece in task.pieces)
        ):
            return False
        return self.seeder.begin_unseeded(samples)

    def drew(self) -> bool:
        """Returns whether samples that were prepared without seeding have drawn from a global generator; if so, all
        later ones are seeded."""
        return self.seeder is not None and self.seeder.moved()

    def fetches_many(self, task: Task) -> bool:
        """Returns whether the data set is asked for the samples of a piece at once."""
        return self._getitems is not None and not task.singly

    def of(self, task: Task, piece: Piece, unseeded: bool) -> Produce:
        """Returns a function that prepares the samples of this piece.

        If the data set can return them all at once, and they need no seeds, this call fetches them.
        """
        produce = self._once(task, piece, unseeded)
        if piece.fetched is not None:
            produce = produce if self.sharing is None else self.sharing.shared(produce)
            produce = self._with_bytes(produce, piece.fetched)
        return _twice(produce) if self._job.retries and self._init_error is None else produce

    def _once(self, task: Task, piece: Piece, unseeded: bool) -> Produce:
        if self._init_error is not None:
            return lambda at: self.check_started()
        if task.kind == "inspect":
            return lambda at: self._inspect(task, piece, at)
        if self._job.pipeline is not None:
            return lambda at: self._through_pipeline(task, piece, at, unseeded)
        dataset, keys = self._job.dataset, piece.keys
        if self._getitems is not None:
            batch = self._fetch_many(task, piece, unseeded)
            if batch is not None:
                return batch.__getitem__
        elif unseeded or self.seeder is None:
            return lambda at: dataset[keys[at]]
        return lambda at: self._seeded(task, piece, at)

    @staticmethod
    def _with_bytes(produce: Produce, fetched: list[tuple[Place, ...]]) -> Produce:
        """Returns the same function, with what has been read ahead for a sample ready for it."""

        def produced(at: int) -> Value:
            AT_HAND.put(fetched[at])
            return produce(at)

        return produced

    def _inspect(self, task: Task, piece: Piece, at: int) -> Features:
        """Runs the host read of a pipeline; returns its fields and the cost features that it reveals."""
        pipeline = self._job.pipeline
        self._on_stage(-1)
        source, seed = self._seeded(task, piece, at), self._seed_of(task, piece, at)
        assert pipeline is not None
        fields = pipeline.run(source, seed, stop=pipeline.host_prefix, before_stage=self._seeding(seed))
        try:
            stored = self._put(fields, pipeline.host_prefix, seed)
        except Exception as error:
            path = str(fields["path"]) if "path" in fields else None
            raise StageError("the host read cannot be sent", Origin(stage="send", path=path)) from error
        return Features(stored, pipeline.features(fields))

    def _put(self, fields: Value, cut: int, seed: int) -> Stored:
        """Stores what the stages from ``cut`` on need, drawn parameters included, as a device's thread has no time to
        draw; returns where."""
        wanted = self._wanted[cut]
        assert self._store is not None, "only lanes hand over parts of samples"
        begun: Begun = {name: value for name, value in fields.items() if name in wanted}, self._drawn(fields, cut, seed)
        return self._store.put(begun)

    def _drawn(self, fields: Value, cut: int, seed: int) -> Draws | None:
        """Returns what the stages from ``cut`` on draw; None if one cannot, or draws what might not be picklable."""
        pipeline = self._job.pipeline
        assert pipeline is not None
        try:
            drawn = {}
            for stage in range(cut, len(pipeline.stages)):
                if self.seeder is not None and pipeline.stages[stage].draw is not None:
                    self.seeder.seed(stage_seed(seed, stage))
                drawn[stage] = pipeline.draw(stage, fields, seed)
        except Exception:  # of the sample: raised again where that stage is at work
            return None
        return None if any(value.dtype.hasobject for one in drawn.values() for value in one.values()) else drawn

    def failure(self, task: Task, piece: Piece, at: int, error: Exception) -> Failure:
        """Returns the error of one sample, with its origin, ready to be raised in the training process."""
        if isinstance(error, KnownFailure):
            return error.failure
        cause, origin = self.explained(task, piece, at, error)
        # a worker that could not start is no fault of its samples': their batches are not left out, but raise
        return failure(cause, f"{self.who} ({origin})", collated=self._init_error is not None, origin=origin)

    def explained(self, task: Task, piece: Piece, at: int, error: Exception) -> tuple[BaseException, Origin]:
        """Returns the error of the user's code behind a sample's error, and where it happened."""
        return explain(error, Origin(task.epoch, piece.position_of(at), piece.keys[at], lane=self._job.lane))

    def _seed_of(self, task: Task, piece: Piece, at: int) -> int:
        occurrence = 0 if piece.occurrences is None else piece.occurrences[at]
        return sample_seed(task.seed, 0, piece.keys[at], occurrence)

    def _seeded(self, task: Task, piece: Piece, at: int) -> Value:
        """Returns ``dataset[key]``; a worker process seeds its global generators for this sample before."""
        if self.seeder is not None:
            self.seeder.seed(self._seed_of(task, piece, at))
        key = piece.keys[at]
        value = self._job.dataset[key] if self._getitems is None else _samples_of(self._getitems([key]), 1)[0]
        if self.seeder is not None:
            self.seeder.seeded_sample_done()
        return value

    def _seeding(self, seed: int) -> Callable[[int], None]:
        """Returns a function to be called before each stage of a sample, which seeds that stage.

        Each stage has seeds of its own, since it does not know whether a lane, a cache or this worker has done those
        before it.
        """
        return self._on_stage if self.seeder is None else partial(self._seed_stage, self.seeder, seed)

    def _seed_stage(self, seeder: Seeder, seed: int, number: int) -> None:
        self._on_stage(number)
        seeder.seed(stage_seed(seed, number))

    def _through_pipeline(self, task: Task, piece: Piece, at: int, unseeded: bool) -> Value:
        pipeline, seed = self._job.pipeline, self._seed_of(task, piece, at)
        assert pipeline is not None
        before_stage = self._on_stage if unseeded else self._seeding(seed)
        left = None if piece.sources is None else piece.sources[at]
        if left is not None:
            assert self._store is not None, "only lanes take up parts of samples"
            start = pipeline.host_prefix
            if isinstance(left, Failure):
                raise KnownFailure(left)
            if isinstance(left, Handed):
                start = left.stage
            begun: Begun = self._store.get(left.fields if isinstance(left, Handed) else left)
            fields, _ = begun
            if self._job.retries or self._job.repeats:  # a stage that works in place must not see what a first try left
                fields = copy.deepcopy(fields)
            if self._job.cuts:
                return self._in_parts(fields, seed, start, task.stop)
            return pipeline.run(fields, seed, start=start, before_stage=before_stage)
        self._on_stage(-1)
        source = self._job.dataset[piece.keys[at]] if unseeded else self._seeded(task, piece, at)
        if self.keeping is not None:
            return self.keeping.run(source, seed, before_stage)
        return pipeline.run(source, seed, before_stage=before_stage)

    def _in_parts(self, fields: Value, seed: int, start: int, stop: int) -> Value:
        """Runs the sample's stages from ``start`` on; returns its fields, or a ``Handed`` where it is handed over.

        That is before stage ``stop``, or before an earlier split point where the scheduler has asked for it.
        """
        pipeline = self._job.pipeline
        assert pipeline is not None
        end = len(pipeline.stages)
        first, seconds, before, before_stage = start, [], perf_counter(), self._seeding(seed)
        for cut in (*(cut for cut in self._job.cuts if cut > start), end):
            fields = pipeline.run(fields, seed, start=start, stop=cut, before_stage=before_stage)
            start, now = cut, perf_counter()
            seconds.append(now - before)
            before = now
            if cut < end and (cut == stop or self.handing_over(cut)):
                with suppress(Exception):  # what keeps it here (pickling runs the values' own code) is no error of it
                    fields = Handed(self._put(fields, cut, seed), cut)
                    break
        self._part = first, tuple(seconds)
        return fields

    def take_part(self) -> Part | None:
        """Returns the seconds of the last sample's parts, once; None if it failed, or was not done in parts."""
        part, self._part = self._part, None
        return part

    def _fetch_many(self, task: Task, piece: Piece, unseeded: bool) -> list[Value] | None:
        """Returns all samples of the piece by one ``__getitems__``, or None if they must be fetched one by one.

        Draws belong to single samples, so a data set that draws is asked for one sample at a time; and so is one that
        raises, or returns something else than a sample for each index, to find the sample that it does so for.
        """
        assert self._getitems is not None
        if task.singly or (not unseeded and self.seeder is not None):
            return None
        if piece.fetched is not None:
            AT_HAND.put(chain.from_iterable(piece.fetched))
        try:
            return _samples_of(self._getitems(list(piece.keys)), len(piece.keys))
        except Exception:
            return None


def _samples_of(returned: Value, indices: int) -> list[Value]:
    """Returns what ``__getitems__`` returned for so many indices as a list.

    Raises TypeError if it is no sequence (columns by name, say), ValueError for another length.
    """
    kind = type(returned)
    try:
        samples = None if isinstance(returned, (str, bytes)) or hasattr(kind, "keys") else len(returned)
    except TypeError:
        samples = None
    of = f"__getitems__ was given {indices} {'index' if indices == 1 else 'indices'} and returned"
    if samples is None or not hasattr(kind, "__getitem__"):
        raise TypeError(
            f"{of} a {kind.__name__}, which is no sequence of samples: return a list of samples, one for each index. "
            "Only with num_workers=0 and on_error='raise' does collate_fn get whatever __getitems__ returns"
        )
    if samples != indices:
        raise ValueError(f"{of} {samples} samples")
    return list(returned)


def _twice(produce: Callable[[int], Value]) -> Callable[[int], Value]:
    """Returns a function that tries once more what raised; a host read that failed for good is not tried again."""

    def attempt(at: int) -> Value:
        try:
            return produce(at)
        except Exception as error:
            if isinstance(error, KnownFailure):
                raise
        return produce(at)  # out here: what it raises is not reported as raised while the other was handled

    return attempt
