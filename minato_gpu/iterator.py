"""One epoch of a loader with workers, as the training loop sees it: an iterator over an engine's batches."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory as pin
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from minato_gpu import nvjpeg
from minato_gpu.admission.sources import Source
from minato_gpu.admission.speculation import Speculation
from minato_gpu.building import build_engine
from minato_gpu.engine import NOTHING, EndOfEpoch, Engine
from minato_gpu.faults.failures import FailurePolicy, pads_batches
from minato_gpu.faults.later import Later
from minato_gpu.lanes.base import reraise
from minato_gpu.lanes.processes import KilledWorkers, WorkerDied
from minato_gpu.memory.values import mapped
from minato_gpu.resume.resumption import Resumption, begin_source, expected_of
from minato_gpu.resume.sampling import Sampling
from minato_gpu.resume.standing import Standing, generators_of, left_of_thread, told_between
from minato_gpu.samples import sample_seed
from minato_gpu.scheduling.messages import DEVICE
from minato_gpu.scheduling.scheduler import Scheduler


class View:
    """What stays of an epoch run for ``stats()`` when its iterator has gone: the log, and its engine's figures."""

    def __init__(self, engine: Engine, failures: FailurePolicy) -> None:
        self.log = engine.log
        self.failures = failures
        self._assembly = engine.assembly
        self._pump = engine.pump
        self._estimates = engine.pump.estimates
        self._lanes = [lane for lane in engine.pump.lanes.values() if lane.kind == DEVICE]

    def memory(self) -> dict[str, Any]:
        """Bytes in flight, and how good the cost predictions were."""
        nothing = {"samples": 0, "log_sigma": None, "rank_correlation": None}
        loading = self._assembly.loading
        device = {} if loading is None else {"device": loading.stats()}
        if self._lanes:
            decoder = nvjpeg.loaded()  # not always the one that is installed
            found = [{**lane.stats(), "nvjpeg": decoder and ".".join(map(str, decoder))} for lane in self._lanes]
            scheduler = self._pump.scheduler
            if isinstance(scheduler, Scheduler):
                harm = scheduler.harm
                found = [{**stats, "step_s_per_work_s": harm.slope, "spared": harm.spare} for stats in found]
            device["device_lane"] = found if len(found) > 1 else found[0]
        return {
            **device,
            "prediction": nothing if self._estimates is None else self._estimates.report(),
            "bytes_in_flight": self._assembly.holdings.bytes,
            "bytes_in_flight_peak": self._assembly.holdings.peak,
        }


class EngineIterator(_BaseDataLoaderIter):
    """One epoch through an engine. ``ended``: it will deliver nothing more."""

    _base_seed: int

    def __init__(self, loader: Any, number: int, keeps: bool, resumption: Resumption | None = None) -> None:
        engine = loader._engine if keeps else None
        generator = torch.default_generator if loader.generator is None else loader.generator
        goes_on = engine is not None and not engine.closed
        ahead = loader._ahead if goes_on else None
        holds = ahead is not None and ahead[0].number == number and engine is not None and engine.delivered_all
        holds = holds and ahead is not None and ahead[1].holds()
        knows_seed = resumption.knows_seed if resumption is not None else goes_on and loader.persistent_workers
        before = generator.get_state() if knows_seed else None
        super().__init__(loader)
        if before is not None:  # PyTorch draws a seed when persistent workers start, not for every epoch
            generator.set_state(before)
            self._base_seed = loader._base_seed
        if self._shared_seed is not None and not (resumption is not None and resumption.begun):
            # PyTorch draws a data pipe's for every epoch, and once more when workers start
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        self._base_seed = int(self._base_seed)
        self.ended = False
        self._number = number
        self._loader = loader
        self._keeps = keeps
        self._failed: list[tuple[int, int]] | None = None  # what raised: dealt with once the consumer asks for more
        self._raised = Later()  # by the sampler for the next epoch, while a batch lay at hand
        source = self._source(ahead if holds else None, resumption)
        if engine is None or engine.closed:
            engine = build_engine(loader, self._base_seed)
            if keeps:
                loader._engine, loader._base_seed = engine, self._base_seed
                loader._first = loader._first if knows_seed else number
                weakref.finalize(loader, engine.close)
            else:
                weakref.finalize(self, engine.close)
        elif resumption is not None and not knows_seed:  # workers that stay, told to begin anew
            loader._base_seed, loader._first = self._base_seed, number
        if keeps:
            loader._user = weakref.ref(self)
        self._engine = engine
        expected = expected_of(loader, source, resumption)
        self._begin(source, ahead if holds else None, expected, discard=ahead is not None and not holds)
        self._num_yielded = source.delivered.batches if source.streams is None else source.streams.batches
        limits = loader.on_error, loader.max_failures, loader._expected()
        self._failures = FailurePolicy(*limits, engine.log, source.delivered)
        self._pads = pads_batches(loader)
        self.view = View(engine, self._failures)

    def _source(self, ahead: tuple[Source, Speculation] | None, resumption: Resumption | None) -> Source:
        """The epoch's batches, and where it stands for ``state_dict``."""
        loader, number = self._loader, self._number
        workers = (loader._base_seed, loader._first) if self._follows(resumption) else None
        if ahead is not None:
            source, speculation = ahead
            source.order.begun_from = speculation.begun_from(generators_of(loader, Sampling(loader)))
            self._standing = Standing(loader, number, (source.seed, *(workers or (source.seed, number))))
            self._standing.source = source
            return source
        seed = self._base_seed
        if workers is not None and loader._first != number:
            seed = sample_seed(seed, number - loader._first, "epoch")
        source, self._standing = begin_source(loader, number, seed, self._sampler_iter, resumption, workers)
        goes_on = self._keeps and loader._engine is not None and not loader._engine.closed
        if source.streams is not None:
            source.streams.share_seed(self._shared_seed, self._dataset)
        if source.streams is not None and resumption is None and (told := told_between(loader, keeps=self._keeps)):
            source.streams.begin(told)
            source.starts = [] if goes_on else left_of_thread(loader)
        return source

    def _follows(self, resumption: Resumption | None) -> bool:
        """Whether the seeds of workers that persist go on from that of an epoch before."""
        if not (self._keeps and self._loader.persistent_workers):
            return False
        engine = self._loader._engine
        return resumption.knows_seed if resumption is not None else engine is not None and not engine.closed

    def leave(self, engine: Engine) -> None:
        """The loader goes on with other workers: this iterator's go with it."""
        self._keeps = False
        weakref.finalize(self, engine.close)

    def _begin(
        self, source: Source, ahead: tuple[Source, Speculation] | None, expected: int | None, *, discard: bool
    ) -> None:
        loader = self._loader
        loader._ahead = None
        if discard:
            loader._discarded += 1
            loader._speculates = False  # the generators move between epochs: the next guess would be wrong too
        if ahead is not None:
            ahead[1].adopt()
        self._engine.begin(source, expected, prefetched=ahead is not None)
        loader._standing = self._standing

    def __len__(self) -> int:
        """Batches of an epoch, as its loader has it. PyTorch asks the sampler, which knows of no rounds of devices."""
        return len(self._loader) if self._dataset_kind == _DatasetKind.Map else int(super().__len__())

    def __next__(self) -> Any:
        if torch._C._autograd._profiler_enabled() or self._IterableDataset_len_called is not None:
            return super().__next__()
        # PyTorch's own __next__ with nothing to record and no length to compare: 20 microseconds of a cheap batch
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        if self.ended:
            raise StopIteration
        self._settle_failed()
        self._raised.raise_kept()
        try:
            data = self._next_batch()
            if self._keeps and self._loader._speculates and self._loader._ahead is None and self._engine.drained:
                self._try_to_prepare_next()
            if self._engine.assembly.loading is None:  # else it is on the device
                if self._pin_memory:
                    data = pin(data, self._pin_memory_device)
                data = self._loader._to_device(data)
        except EndOfEpoch:
            self._end()
            raise StopIteration from None
        except StopIteration as error:  # a sample's, say, which would end the epoch in silence
            self._failed = self._engine.handed
            raise RuntimeError(str(error) or "StopIteration was raised while a batch was handed over") from error
        except KilledWorkers:
            self._failed = self._engine.handed
            raise
        except WorkerDied:
            self.ended = True
            self._engine.close()
            raise
        except BaseException:
            self._failed = self._engine.handed
            raise
        assert self._engine.handed is not None
        survivor = self._engine.survivor if self._pads else None
        self._standing.delivered(self._engine.handed, survivor, self._failures.count)
        return data

    def _next_batch(self) -> Any:
        """The engine's next batch of which anything is left, or which ranks must have all the same."""
        engine = self._engine
        while True:
            self._standing.asked()
            data = engine.next(self._number, self._failures.take)
            if data is NOTHING and self._pads:
                assert self._standing.source is not None
                data = engine.pad(self._number, self._standing.source.delivered.survivor)
                if data is NOTHING:  # no sample of this rank is left to repeat
                    reraise(engine.bad[0].error)
            if data is not NOTHING:
                return data
            assert engine.handed is not None
            self._standing.delivered(engine.handed, failed=self._failures.count, returned=False)

    def _settle_failed(self) -> None:
        """The consumer goes on after an error: what raised it counts as dealt with, and a resume leaves it out."""
        if self._failed is not None:
            self._standing.delivered(self._failed, failed=self._failures.count, returned=False)
            self._failed = None

    def _try_to_prepare_next(self) -> None:
        """The batch at hand comes first: what the sampler raises is kept for when the consumer asks for more."""
        try:
            self._prepare_next()
        except Exception as error:
            self._raised.keep(error)

    def _prepare_next(self) -> None:
        """The sampler has ended and the window has room: go on with the next epoch, if there will be one."""
        loader, number = self._loader, self._number + 1
        if loader.epochs is not None and number >= loader.epochs:
            return
        ahead = Speculation(loader, draws_seed=not loader.persistent_workers)
        seed = ahead.seed
        if loader.persistent_workers:
            seed = sample_seed(loader._base_seed, number - loader._first, "epoch")
        source = loader._source(number, seed, ahead)
        loader._speculates = False  # should the sampler raise: the next epoch then begins when it does
        self._engine.prefetch(source)
        loader._speculates, loader._ahead = True, (source, ahead)
        loader._prepared += 1

    def _end(self) -> None:
        self.ended = self._standing.over = True
        last = self._loader.epochs is not None and self._number + 1 >= self._loader.epochs
        if not self._keeps or (last and not self._loader.persistent_workers):
            self._engine.close()


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors of a nested batch on ``device``; everything else as it is."""
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))
