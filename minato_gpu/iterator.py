"""One epoch of a loader with workers, as the training loop sees it: an iterator over an engine's batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from minato_gpu import nvjpeg
from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint.progress import EpochProgress
from minato_gpu.checkpoint.resumption import Resumption, begin_epoch
from minato_gpu.delivery import EpochIterator, in_memory
from minato_gpu.engine.building import Records, build_engine
from minato_gpu.engine.engine import Engine
from minato_gpu.faults.deferred import DeferredError
from minato_gpu.lanes.processes import KilledWorkers, WorkerDied
from minato_gpu.samples import Value, sample_seed
from minato_gpu.sampling.orders import Order
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.sampling.sources import Source, source_of
from minato_gpu.sampling.speculation import Speculation
from minato_gpu.scheduling.messages import DEVICE
from minato_gpu.scheduling.scheduler import Scheduler
from minato_gpu.session import Session


def _memory_of(engine: Engine) -> Callable[[], dict[str, Any]]:
    """Tells of the engine's bytes in flight, its devices and its predictions, without keeping the engine."""
    assembly, pump, estimates = engine.assembly, engine.pump, engine.pump.estimates
    lanes = [lane for lane in pump.lanes.values() if lane.kind == DEVICE]

    def memory() -> dict[str, Any]:
        device = {} if assembly.loading is None else {"device": assembly.loading.stats()}
        if lanes:
            decoder = nvjpeg.loaded()  # not always the one that is installed
            found = [{**lane.stats(), "nvjpeg": decoder and ".".join(map(str, decoder))} for lane in lanes]
            if isinstance(pump.run.scheduler, Scheduler):
                harm = pump.run.scheduler.harm
                found = [{**stats, "step_s_per_work_s": harm.slope, "spared": harm.spare} for stats in found]
            device["device_lane"] = found if len(found) > 1 else found[0]
        predicted = None if estimates is None else estimates.report()
        if pump.reads is not None:
            device["reads"] = engine.read_stats()
            if kept := pump.reads.cache_stats():
                device["cache"] = kept
        return {**device, **in_memory(assembly.holdings.bytes, assembly.holdings.peak, predicted)}

    return memory


class EngineIterator(EpochIterator):
    """One epoch through an engine."""

    def __init__(self, loader: Arguments, session: Session, number: int, resumption: Resumption | None) -> None:
        keeps = session.may_keep(loader, resumption)
        engine = session.engine if keeps else None
        goes_on = engine is not None and not engine.closed
        ahead = session.ahead if goes_on else None
        holds = ahead is not None and ahead[0].number == number and engine is not None and engine.delivered_all
        holds = holds and ahead is not None and ahead[1].holds()
        knows_seed = resumption.knows_seed if resumption is not None else goes_on and loader.persistent_workers
        # PyTorch draws a seed when persistent workers start, not for every epoch
        super().__init__(loader, session.base_seed if knows_seed else None)
        if self._shared_seed is not None and not (resumption is not None and resumption.begun):
            # PyTorch draws a data pipe's for every epoch, and once more when workers start
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._number = number
        self._session = session
        self._keeps = keeps
        self._raised = DeferredError()  # by the sampler for the next epoch, while a batch lay at hand
        follows = keeps and loader.persistent_workers and bool(knows_seed)
        workers = (session.base_seed, session.first_epoch) if follows else None
        if ahead is not None and holds:
            progress = self._prepared(*ahead, workers)
        else:
            progress = self._fresh(resumption, workers, goes_on=goes_on)
        begins_anew = resumption is not None and not knows_seed
        self._engine = engine if engine is not None and goes_on else self._new_engine(knows_seed=bool(knows_seed))
        if goes_on and begins_anew:  # workers that stay are told to
            session.base_seed, session.first_epoch = self._base_seed, number
        if keeps:
            session.keep(self._engine, self)
        self._begin(progress, ahead, holds=holds)
        session.progress = progress
        self._deliver(session.options, self._engine, progress, _memory_of(self._engine))

    def _new_engine(self, *, knows_seed: bool) -> Engine:
        """With workers of its own, which end with the loader if they are kept, else with this iterator."""
        loader, session = self._loader, self._session
        records = Records(session.order_log, session.next_event_log(), session.facts)
        engine = build_engine(loader, session.options, self._base_seed, records, session.kept_memory())
        weakref.finalize(loader if self._keeps else self, engine.close)
        if self._keeps:
            session.base_seed = self._base_seed
            session.first_epoch = session.first_epoch if knows_seed else self._number
        return engine

    def _prepared(self, source: Source, speculation: Speculation, workers: tuple[int, int] | None) -> EpochProgress:
        """The epoch as it was drawn ahead."""
        source.order.begun_from = speculation.begun_from(Sampling(self._loader).generators)
        return EpochProgress(self._loader, source, workers)

    def _fresh(self, resumption: Resumption | None, workers: tuple[int, int] | None, *, goes_on: bool) -> EpochProgress:
        """The epoch as it begins, or goes on. ``workers``: the seed of those that persist, and the epoch in which they
        started; ``goes_on``: workers have stayed."""
        loader, session, number, seed = self._loader, self._session, self._number, self._base_seed
        if workers is not None and session.first_epoch != number:
            seed = sample_seed(seed, number - session.first_epoch, "epoch")
        progress = begin_epoch(loader, number, seed, self._sampler_iter, resumption, workers)
        if (streams := progress.source.streams) is not None:
            streams.share_seed(self._shared_seed, self._dataset)
            if resumption is None and (told := session.streams_between(loader, keeps=self._keeps)):
                streams.begin(told, () if goes_on else session.left_here(loader))
        return progress

    def leave(self, engine: Engine) -> None:
        """See session.User."""
        self._keeps = False
        weakref.finalize(self, engine.close)

    def _begin(self, progress: EpochProgress, ahead: tuple[Source, Speculation] | None, *, holds: bool) -> None:
        session = self._session
        session.ahead = None
        if ahead is not None and holds:
            ahead[1].adopt()
        elif ahead is not None:
            session.discarded += 1
            session.speculates = False  # the generators move between epochs: the next guess would be wrong too
        self._engine.begin(progress.source, progress.expected, prefetched=holds)

    def _next_batch(self) -> Value:
        try:
            data = super()._next_batch()
        except KilledWorkers:
            raise
        except WorkerDied:
            self.ended = True
            self._engine.close()
            raise
        session = self._session
        if self._keeps and session.speculates and session.ahead is None and self._engine.drained:
            self._try_to_prepare_next()
        return data

    def _placed(self, data: Value) -> Value:
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
        loader, session, number = self._loader, self._session, self._number + 1
        if loader.epochs is not None and number >= loader.epochs:
            return
        ahead = Speculation(loader, draws_seed=not loader.persistent_workers)
        seed = ahead.seed
        if loader.persistent_workers:
            seed = sample_seed(session.base_seed, number - session.first_epoch, "epoch")
        source = source_of(loader, number, seed, Order(ahead))
        session.speculates = False  # should the sampler raise: the next epoch then begins when it does
        self._engine.prefetch(source)
        session.speculates, session.ahead = True, (source, ahead)
        session.prepared += 1

    def _end(self) -> None:
        super()._end()
        self.ended = True
        last = self._loader.epochs is not None and self._number + 1 >= self._loader.epochs
        if not self._keeps or (last and not self._loader.persistent_workers):
            self._engine.close()
