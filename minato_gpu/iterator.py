"""One epoch of a loader with workers, as the training loop sees it: an iterator over an engine's batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from minato_gpu import nvjpeg
from minato_gpu.checkpoint.progress import EpochProgress, generators_of, left_of_thread, told_between
from minato_gpu.checkpoint.resumption import Resumption, begin_source, expected_of
from minato_gpu.delivery import EpochIterator, View, in_memory
from minato_gpu.engine.building import build_engine
from minato_gpu.engine.engine import Engine
from minato_gpu.faults.deferred import DeferredError
from minato_gpu.lanes.processes import KilledWorkers, WorkerDied
from minato_gpu.samples import sample_seed
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.sampling.sources import Source
from minato_gpu.sampling.speculation import Speculation
from minato_gpu.scheduling.messages import DEVICE
from minato_gpu.scheduling.scheduler import Scheduler


def _memory_of(engine: Engine) -> Callable[[], dict[str, Any]]:
    """Tells of the engine's bytes in flight, its devices and its predictions, without keeping the engine."""
    assembly, pump, estimates = engine.assembly, engine.pump, engine.pump.estimates
    lanes = [lane for lane in pump.lanes.values() if lane.kind == DEVICE]

    def memory() -> dict[str, Any]:
        device = {} if assembly.loading is None else {"device": assembly.loading.stats()}
        if lanes:
            decoder = nvjpeg.loaded()  # not always the one that is installed
            found = [{**lane.stats(), "nvjpeg": decoder and ".".join(map(str, decoder))} for lane in lanes]
            if isinstance(pump.scheduler, Scheduler):
                harm = pump.scheduler.harm
                found = [{**stats, "step_s_per_work_s": harm.slope, "spared": harm.spare} for stats in found]
            device["device_lane"] = found if len(found) > 1 else found[0]
        predicted = None if estimates is None else estimates.report()
        return {**device, **in_memory(assembly.holdings.bytes, assembly.holdings.peak, predicted)}

    return memory


class EngineIterator(EpochIterator):
    """One epoch through an engine."""

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
        self._number = number
        self._loader = loader
        self._keeps = keeps
        self._raised = DeferredError()  # by the sampler for the next epoch, while a batch lay at hand
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
        self.view = View(engine.log, self._deliver(loader, number, engine, self._standing), _memory_of(engine))

    def _source(self, ahead: tuple[Source, Speculation] | None, resumption: Resumption | None) -> Source:
        """The epoch's batches, and where it stands for ``state_dict``."""
        loader, number = self._loader, self._number
        workers = (loader._base_seed, loader._first) if self._follows(resumption) else None
        if ahead is not None:
            source, speculation = ahead
            source.order.begun_from = speculation.begun_from(generators_of(loader, Sampling(loader)))
            self._standing = EpochProgress(loader, number, (source.seed, *(workers or (source.seed, number))))
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

    def _next_batch(self) -> Any:
        try:
            data = super()._next_batch()
        except KilledWorkers:
            raise
        except WorkerDied:
            self.ended = True
            self._engine.close()
            raise
        if self._keeps and self._loader._speculates and self._loader._ahead is None and self._engine.drained:
            self._try_to_prepare_next()
        return data

    def _placed(self, data: Any) -> Any:
        return data if self._engine.assembly.loading is not None else super()._placed(data)

    def _go_on(self) -> None:
        super()._go_on()
        self._raised.raise_kept()

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
        super()._end()
        self.ended = True
        last = self._loader.epochs is not None and self._number + 1 >= self._loader.epochs
        if not self._keeps or (last and not self._loader.persistent_workers):
            self._engine.close()
