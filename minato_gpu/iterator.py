"""One epoch of a loader with workers, as the training loop sees it: an iterator over an engine's batches."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory as pin
from torch.utils.data.dataloader import _BaseDataLoaderIter

from minato_gpu.admission import Source, Speculation
from minato_gpu.building import build_engine
from minato_gpu.engine import EndOfEpoch, Engine, WorkerDied
from minato_gpu.memory.loads import mapped
from minato_gpu.samples import sample_seed


class View:
    """What stays of an epoch run for ``stats()`` when its iterator has gone: the log, and its engine's figures."""

    def __init__(self, engine: Engine) -> None:
        self.log = engine.log
        self._assembly = engine.assembly
        self._pump = engine.pump
        self._estimates = engine.pump.estimates
        self._lane = engine.pump.lanes.get("device")

    def memory(self) -> dict[str, Any]:
        """Bytes in flight, and how good the cost predictions were."""
        nothing = {"samples": 0, "log_sigma": None, "rank_correlation": None}
        loading = self._assembly.loading
        device = {} if loading is None else {"device": loading.transfers.stats()}
        if self._lane is not None:
            device["device_lane"] = self._lane.stats()
            harm = getattr(self._pump.scheduler, "harm", None)
            if harm is not None:
                device["device_lane"].update(step_s_per_work_s=harm.slope, spared=harm.spare)
        return {
            **device,
            "prediction": nothing if self._estimates is None else self._estimates.report(),
            "bytes_in_flight": self._assembly.bytes,
            "bytes_in_flight_peak": self._assembly.peak,
        }


class EngineIterator(_BaseDataLoaderIter):
    """One epoch through an engine. ``ended``: it will deliver nothing more."""

    _base_seed: int

    def __init__(self, loader: Any, number: int, keeps: bool) -> None:
        engine = loader._engine if keeps else None
        generator = torch.default_generator if loader.generator is None else loader.generator
        goes_on = engine is not None and not engine.closed
        ahead = loader._ahead if goes_on else None
        holds = ahead is not None and ahead[0].number == number and engine is not None and engine.delivered_all
        holds = holds and ahead is not None and ahead[1].holds()
        before = generator.get_state() if goes_on and loader.persistent_workers else None
        super().__init__(loader)
        if before is not None:  # PyTorch draws a seed when persistent workers start, not for every epoch
            generator.set_state(before)
            self._base_seed = loader._base_seed
        self._base_seed = int(self._base_seed)
        self.ended = False
        self._number = number
        self._loader = loader
        if engine is None or engine.closed:
            engine = build_engine(loader, self._base_seed)
            if keeps:
                loader._engine, loader._base_seed, loader._first = engine, self._base_seed, number
                weakref.finalize(loader, engine.close)
            else:
                weakref.finalize(self, engine.close)
        if keeps:
            loader._user = weakref.ref(self)
        self._keeps = keeps
        self._engine = engine
        self._begin(ahead if holds else None, discard=ahead is not None and not holds)
        self.view = View(engine)

    def _begin(self, ahead: tuple[Source, Speculation] | None, *, discard: bool) -> None:
        loader, engine = self._loader, self._engine
        loader._ahead = None
        if discard:
            loader._discarded += 1
            loader._speculates = False  # the generators move between epochs: the next guess would be wrong too
        if ahead is not None:
            ahead[1].adopt()
            engine.begin(ahead[0], loader._expected(), prefetched=True)
            return
        seed = self._base_seed
        if self._keeps and loader.persistent_workers and self._number != loader._first:
            seed = sample_seed(seed, self._number - loader._first, "epoch")
        source = loader._source(self._number, seed, self._sampler_iter)
        engine.begin(source, loader._expected(), prefetched=False)

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
        try:
            data = self._engine.next(self._number)
        except EndOfEpoch:
            self._end()
            raise StopIteration from None
        except WorkerDied:
            self.ended = True
            self._engine.close()
            raise
        if self._keeps and self._loader._speculates and self._loader._ahead is None and self._engine.drained:
            self._prepare_next()
        if self._engine.assembly.loading is not None:
            return data  # it is on the device
        if self._pin_memory:
            data = pin(data, self._pin_memory_device)
        return self._loader._to_device(data)

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
        loader._ahead = (source, ahead)
        loader._prepared += 1
        self._engine.prefetch(source)

    def _end(self) -> None:
        self.ended = True
        last = self._loader.epochs is not None and self._number + 1 >= self._loader.epochs
        if not self._keeps or (last and not self._loader.persistent_workers):
            self._engine.close()


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors of a nested batch on ``device``; everything else as it is."""
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))
