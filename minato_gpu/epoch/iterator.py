"""The iterator of one epoch of a loader with workers, over an engine's batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint.cursor import Cursor
from minato_gpu.checkpoint.resumption import Resumption, begin_epoch
from minato_gpu.device import nvjpeg
from minato_gpu.engine.builder import build_engine
from minato_gpu.engine.engine import Engine
from minato_gpu.epoch.delivery import EpochIterator, in_memory
from minato_gpu.epoch.session import Session
from minato_gpu.lanes.processes import KilledWorkers, WorkerDied
from minato_gpu.samples import Value, sample_seed
from minato_gpu.sampling.epoch_batches import EpochBatches
from minato_gpu.sampling.order import Order
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.sampling.speculation import Speculation
from minato_gpu.scheduling.messages import DEVICE
from minato_gpu.scheduling.spans import Span


def _memory_of(engine: Engine) -> Callable[[], dict[str, Any]]:
    """Returns a function that makes an engine's entries of ``stats()`` (bytes in flight, predictions, devices, other
    machines, reads, caches, window), and does not keep the engine."""
    assembly, pump, epochs, estimates = engine.assembly, engine.pump, engine.epochs, engine.pump.estimates
    lanes = [lane for lane in pump.lanes.values() if lane.kind == DEVICE]
    nodes = [lane for lane in pump.lanes.values() if not lane.on_host]

    def memory() -> dict[str, Any]:
        predicted = None if estimates is None else estimates.report()
        found = in_memory(assembly.holdings.bytes, assembly.holdings.peak, predicted)
        found["window"] = epochs.stats()
        if assembly.loading is not None:
            found["device"] = assembly.loading.stats()
        if lanes:
            decoder, interference = nvjpeg.loaded(), pump.run.scheduler.interference
            more = {
                "nvjpeg": decoder and ".".join(map(str, decoder)),  # not always the one that is installed
                "step_s_per_work_s": interference.slope,
                "spared": interference.spare,
            }
            stats = [{**lane.stats(), **more} for lane in lanes]
            found["device_lane"] = stats if len(stats) > 1 else stats[0]
        if nodes:
            found["nodes"] = {lane.name: lane.stats() for lane in nodes}
        if pump.reads is not None:
            found |= pump.read_stats(pump.reads)
        return found

    return memory


class EngineIterator(EpochIterator):
    """The iterator of one epoch through an engine."""

    def __init__(self, loader: Arguments, session: Session, number: int, resumption: Resumption | None) -> None:
        self._number, self._session = number, session
        keeps = session.may_keep(loader, resumption)
        engine = session.engine if keeps and session.engine is not None and not session.engine.closed else None
        goes_on = engine is not None
        ahead, prepared = session.ahead if goes_on else None, None
        if ahead is not None and ahead[0].number == number and engine is not None and engine.epochs.delivered_all:
            prepared = ahead if ahead[1].holds() else None
        knows_seed = resumption.knows_seed if resumption is not None else goes_on and loader.persistent_workers
        # PyTorch draws a seed when persistent workers start, not for every epoch
        super().__init__(loader, session.base_seed if knows_seed else None)
        if self._shared_seed is not None and not (resumption is not None and resumption.begun):
            # PyTorch draws a data pipe's shared seed for every epoch, and a second one when workers start
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        follows = keeps and loader.persistent_workers and knows_seed
        workers = (session.base_seed, session.first_epoch) if follows else None
        if prepared is not None:
            epoch, speculation = prepared
            epoch.order.begun_from = speculation.begun_from(Sampling(loader).generators)
            cursor = Cursor(loader, epoch, workers)
        else:
            cursor = self._fresh(resumption, workers, keeps=keeps, goes_on=goes_on)
        if goes_on and resumption is not None and not knows_seed:  # workers that stay begin anew
            session.base_seed, session.first_epoch = self._base_seed, number
        self._engine = engine or self._new_engine(keeps=keeps, knows_seed=knows_seed)
        if keeps:
            session.keep(self._engine, self)
        session.settle_ahead(ahead, begins=prepared is not None)
        self._engine.begin(cursor.epoch, cursor.expected, prefetched=prepared is not None)
        session.cursor = cursor
        moves = self._engine.assembly.loading is None
        self._deliver(session.options, self._engine, cursor, _memory_of(self._engine), moves=moves)

    def _new_engine(self, *, keeps: bool, knows_seed: bool) -> Engine:
        """Builds an engine with workers of its own. It ends with the session if ``keeps``, else with this iterator."""
        loader, session = self._loader, self._session
        before = self._number - session.first_epoch if knows_seed else 0
        engine = build_engine(loader, session.options, self._base_seed, session.facts, session.readers, before)
        weakref.finalize(session if keeps else self, engine.close)
        if keeps:
            session.base_seed = self._base_seed
            session.first_epoch = session.first_epoch if knows_seed else self._number
        return engine

    def _fresh(
        self, resumption: Resumption | None, workers: tuple[int, int] | None, *, keeps: bool, goes_on: bool
    ) -> Cursor:
        """Returns the cursor of an epoch that begins, or goes on from ``resumption``.

        ``workers`` is the seed of persistent workers and the epoch in which they started. ``keeps``: the workers will
        stay; ``goes_on``: they have stayed from an earlier epoch.
        """
        loader, session, number, seed = self._loader, self._session, self._number, self._base_seed
        if workers is not None and session.first_epoch != number:
            seed = sample_seed(seed, number - session.first_epoch, "epoch")
        cursor = begin_epoch(loader, number, seed, self._sampler_iter, resumption, workers)
        if (streams := cursor.epoch.streams) is not None:
            streams.share_seed(self._shared_seed, self._dataset)
            if resumption is None and (told := session.streams_between(loader, keeps=keeps)):
                streams.begin(told, () if goes_on else session.left_here(loader))
        return cursor

    @property
    def _keeps(self) -> bool:
        """True if the workers are the session's and stay for later epochs."""
        return self._session.engine is self._engine

    def _next_batch(self) -> tuple[Value, Sequence[Span], int]:
        try:
            taken = super()._next_batch()
        except KilledWorkers:
            raise
        except WorkerDied:
            self.ended = True
            self._engine.close()
            raise
        session = self._session
        if self._keeps and session.speculates and session.ahead is None and self._engine.epochs.drained:
            with suppress(Exception):  # the sampler's: the next epoch is then drawn when it begins
                self._prepare_next()
        return taken

    def _prepare_next(self) -> None:
        """Begins the next epoch early, if ``epochs`` has another. Called once the sampler has ended and the window has
        room. Raises what the sampler raises; then no epoch is begun early any more."""
        loader, session, number = self._loader, self._session, self._number + 1
        if loader.epochs is not None and number >= loader.epochs:
            return
        ahead = Speculation(loader, draws_seed=not loader.persistent_workers)
        seed = ahead.seed
        if loader.persistent_workers:
            seed = sample_seed(session.base_seed, number - session.first_epoch, "epoch")
        epoch = EpochBatches(loader, number, seed, Order(ahead))
        session.speculates = False  # should the sampler raise, nothing is prepared early
        self._engine.prefetch(epoch)
        session.speculates, session.ahead = True, (epoch, ahead)
        session.prepared += 1

    def _end(self) -> None:
        super()._end()
        self.ended = True
        last = self._loader.epochs is not None and self._number + 1 >= self._loader.epochs
        if not self._keeps or (last and not self._loader.persistent_workers):
            self._engine.close()
