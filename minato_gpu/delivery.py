"""One epoch of a loader, as the training loop sees it: what becomes of each batch before the loop has it.

The same with workers and without; only where batches come from differs, see window/contract.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Sized
from time import perf_counter
from typing import NamedTuple, cast

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory as pin
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint.cursor import Cursor
from minato_gpu.device.collated import mapped
from minato_gpu.faults.failures import FailurePolicy
from minato_gpu.lanes.base import reraise
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.options import Options, pads_batches
from minato_gpu.samples import JSON, Value
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.scheduling.messages import Span
from minato_gpu.window.contract import NOTHING, Batches, EndOfEpoch


class EpochView(NamedTuple):
    """What stays of an epoch for ``stats()`` when its iterator has gone. ``memory`` makes what ``in_memory`` does."""

    log: Telemetry
    failures: FailurePolicy
    memory: Callable[[], dict[str, JSON]]


def in_memory(nbytes: int = 0, peak: int = 0, prediction: dict[str, JSON] | None = None) -> dict[str, JSON]:
    """Bytes in flight, and how good the predictions of costs were."""
    nothing = {"samples": 0, "log_sigma": None, "rank_correlation": None}
    return {"prediction": prediction or nothing, "bytes_in_flight": nbytes, "bytes_in_flight_peak": peak}


class EpochIterator(_BaseDataLoaderIter):
    """One epoch. ``ended``: it will deliver nothing more."""

    _base_seed: int
    ended = False
    view: EpochView

    def __init__(self, loader: Arguments, seed: int | None) -> None:
        """``seed``: the base seed, where it is known; then no generator moves."""
        generator = torch.default_generator if loader.generator is None else loader.generator
        before = generator.get_state()
        super().__init__(cast("DataLoader[Value]", loader))
        if seed is not None:
            generator.set_state(before)
        self._base_seed = int(self._base_seed if seed is None else seed)
        self._loader = loader

    def _deliver(
        self,
        options: Options,
        batches: Batches,
        cursor: Cursor,
        memory: Callable[[], dict[str, JSON]] = in_memory,
    ) -> None:
        """Deliver these batches from now on; to be called by the constructor, last."""
        loader = self._loader
        self._number = cursor.epoch.number
        self._batches = batches
        self._devices = options.devices
        self._stays = options.device.type == "cpu" and not self._pin_memory  # batches are where they are wanted
        self._cursor = cursor
        self._num_yielded = cursor.batches
        self._failed: Sequence[Span] | None = None  # what raised: dealt with once the consumer asks for more
        self._pads = pads_batches(loader, options)
        limits = loader.on_error, loader.max_failures, Sampling(loader).expected
        self._failures = FailurePolicy(*limits, batches.log, cursor.epoch.delivered)
        self.view = EpochView(batches.log, self._failures, memory)
        weakref.finalize(self, batches.log.left)

    def __len__(self) -> int:
        """Batches of an epoch, as its loader has it. PyTorch asks the sampler, which knows of no rounds of devices."""
        return len(cast("Sized", self._loader)) if self._dataset_kind == _DatasetKind.Map else int(super().__len__())

    def __next__(self) -> Value:
        if torch._C._autograd._profiler_enabled() or self._IterableDataset_len_called is not None:
            return super().__next__()
        # PyTorch's own __next__ with nothing to record and no length to compare: 20 microseconds of a cheap batch
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Value:
        if self.ended:
            raise StopIteration
        self._go_on()
        try:
            data = self._placed(self._next_batch())
        except EndOfEpoch:
            self._end()
            raise StopIteration from None
        except BaseException as error:
            self._failed = self._batches.delivered
            if isinstance(error, StopIteration):  # a sample's, say, which would end the epoch in silence
                raise RuntimeError(_said_by(error)) from error
            raise
        assert self._batches.delivered is not None
        survivor = self._batches.survivor if self._pads else None
        self._cursor.delivered(self._batches.delivered, survivor, self._failures.count)
        return data

    def _next_batch(self) -> Value:
        """The next batch of which anything is left, or which ranks must have all the same."""
        batches = self._batches
        if batches.log.facts.hearers:
            batches.log.asked(perf_counter())
        while True:
            data = batches.next(self._number, self._failures.take, self._cursor.asked)
            if data is NOTHING and self._pads:
                data = batches.pad(self._number, self._cursor.epoch.delivered.survivor)
                if data is NOTHING:  # no sample of this rank is left to repeat
                    reraise(batches.bad[0].error)
            if data is not NOTHING:
                return data
            assert batches.delivered is not None
            self._cursor.delivered(batches.delivered, failed=self._failures.count, returned=False)

    def _placed(self, data: Value) -> Value:
        """The batch where the training loop wants it."""
        if self._stays:
            return data
        if self._pin_memory:
            data = pin(data, self._pin_memory_device)
        devices = self._devices
        return data if devices[0].type == "cpu" else to_device(data, devices[self._cursor.batches % len(devices)])

    def _go_on(self) -> None:
        """The consumer asks for more: what raised last counts as dealt with, and a resume leaves it out."""
        if self._failed is not None:
            self._cursor.delivered(self._failed, failed=self._failures.count, returned=False)
            self._failed = None

    def _end(self) -> None:
        """The consumer is told that the epoch is over."""
        self._cursor.over = True


def _said_by(error: StopIteration) -> str:
    """What raised it, in words: a worker's error says it, and others have a note."""
    notes = getattr(error, "__notes__", ())
    said = f"StopIteration ({notes[-1]}): {error}".removesuffix(": ") if notes else str(error)
    return said or "StopIteration was raised while a batch was handed over"


def to_device(batch: Value, device: torch.device) -> Value:
    """Tensors of a nested batch on ``device``; everything else as it is."""
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))
