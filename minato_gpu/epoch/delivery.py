"""One epoch of a loader as the training loop sees it: what happens to each batch before the loop gets it.

It is the same with workers and without; only where batches come from differs (window/contract.py).
"""

from __future__ import annotations

import weakref
from collections import deque
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
from minato_gpu.epoch.padding import batch_of, pads_batches
from minato_gpu.faults.failures import FailurePolicy
from minato_gpu.lanes.base import NoSample
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.options.options import Options
from minato_gpu.samples import JSON, Ticket, Value
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.scheduling.spans import Span
from minato_gpu.window.contract import NOTHING, Batches, EndOfEpoch


class EpochView(NamedTuple):
    """The part of an epoch that ``stats()`` needs after its iterator is gone.

    ``memory`` returns the entries of ``in_memory`` and, with workers, those of devices, reads, caches and the window.
    """

    log: Telemetry
    failures: FailurePolicy
    memory: Callable[[], dict[str, JSON]]


def in_memory(nbytes: int = 0, peak: int = 0, prediction: dict[str, JSON] | None = None) -> dict[str, JSON]:
    """Returns the entries of ``stats()`` on bytes in flight and on predictions of costs; ``prediction`` None: none."""
    nothing = {"samples": 0, "log_sigma": None, "rank_correlation": None}
    return {"prediction": prediction or nothing, "bytes_in_flight": nbytes, "bytes_in_flight_peak": peak}


class TakenBatch(NamedTuple):
    """A batch taken from ``Batches`` that is not delivered yet."""

    data: Value  # NOTHING if all of its samples were left out
    positions: Sequence[Span]  # of a stream: its ticket
    failed: int  # samples of the epoch that had been left out by then
    good: Ticket | None  # a sample of it that could take the place of another batch


class EpochIterator(_BaseDataLoaderIter):
    """The iterator of one epoch. ``ended``: it will deliver nothing more; set with workers only."""

    _base_seed: int
    ended = False
    view: EpochView

    def __init__(self, loader: Arguments, seed: int | None) -> None:
        """``seed``: the epoch's base seed, where it is known; then no generator moves. None: it is drawn from the
        loader's generator, else the global one, as PyTorch does."""
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
        *,
        moves: bool = True,
    ) -> None:
        """Delivers these batches from now on; constructors call it last.

        ``memory``: see ``EpochView``. ``moves``: moves batches to their device.
        """
        loader = self._loader
        self._number = cursor.epoch.number
        self._batches = batches
        self._devices = options.devices
        self._moves = moves and (options.device.type != "cpu" or self._pin_memory)
        self._cursor = cursor
        self._num_yielded = cursor.batches
        self._failed: Sequence[Span] | None = None  # what raised: dealt with once the consumer asks for more
        self._options = options
        self._pads = pads_batches(loader, options)
        self._held: deque[TakenBatch] = deque()  # taken to find a good sample
        self._good: Ticket | None = None  # a sample of the last batch that had one
        limits = loader.on_error, loader.max_failures, Sampling(loader).expected
        self._failures = FailurePolicy(*limits, batches.log, cursor.epoch.delivered)
        self.view = EpochView(batches.log, self._failures, memory)
        weakref.finalize(self, batches.log.left)

    def __len__(self) -> int:
        """Returns the number of batches of an epoch, as the loader does.

        PyTorch's own method would ask the sampler, which does not know of several devices.
        """
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
            data, positions, failed = self._next_batch()
        except EndOfEpoch:
            self._end()
            raise StopIteration from None
        except BaseException as error:
            self._failed = self._batches.delivered
            if isinstance(error, StopIteration):  # a sample's, say, which would end the epoch in silence
                raise RuntimeError(_said_by(error)) from error
            raise
        self._cursor.delivered(positions, failed)
        return data

    def _next_batch(self) -> tuple[Value, Sequence[Span], int]:
        """Returns the next batch that is not left out: its value where the training loop wants it, its positions, and
        how many samples of the epoch had been left out by then.

        A batch that has lost all its samples is left out or, where other ranks or devices count on it, comes as one of
        a single repeated sample. Raises as ``Batches.next``, and RuntimeError if there is no sample to repeat.
        """
        batches = self._batches
        if batches.log.facts.subscribers:
            batches.log.asked(perf_counter())
        while True:
            taken = self._held.popleft() if self._held else self._take()
            batches.delivered = taken.positions
            if taken.data is not NOTHING:
                self._good = taken.good or self._good
                data = self._moved(taken.data) if self._moves else taken.data
                return data, taken.positions, taken.failed
            if self._pads:
                return self._padded(taken), taken.positions, taken.failed
            self._cursor.delivered(taken.positions, taken.failed, returned=False)

    def _take(self) -> TakenBatch:
        """Takes the next batch, with NOTHING as its value if it has lost all samples. Raises as ``Batches.next``."""
        batches = self._batches
        data = batches.next(self._number, self._failures.take, self._cursor.asked)
        assert batches.delivered is not None
        good = None if data is NOTHING else batches.last_good
        good = None if good is None or isinstance(good.index, NoSample) else good
        return TakenBatch(data, batches.delivered, self._failures.count, good)

    def _padded(self, lost: TakenBatch) -> Value:
        """Returns a batch of one sample in place of a batch that has lost all of its own: a sample of the last batch
        that has a good one, else of the next, up to which batches are taken.

        Raises RuntimeError if there is none, and what taking a batch raises: then ``lost`` comes after that one.
        """
        began, log = perf_counter(), self._batches.log
        try:
            good = self._good or self._look_ahead()
        except BaseException:
            self._held.appendleft(lost)  # the batch that raised is another, and this one is still to come
            raise
        self._batches.delivered = lost.positions
        if good is None:
            raise RuntimeError(
                f"epoch {self._number}: every sample of a batch was left out, and this rank has no good one to put in "
                "its place; without a batch other ranks would wait for ever. Repair the samples that "
                'stats()["failures"] names, or resume from an earlier state'
            )
        data = self._moved(batch_of(self._loader, self._options, self._cursor.epoch.seed, good))
        now = perf_counter()
        log.delivered(now, self._cursor.batches, 0, now - began, (), padded=1)
        return data

    def _look_ahead(self) -> Ticket | None:
        """Returns a good sample of the next batches, which are taken as far as needed; None if there is none."""
        while not self._held or self._held[-1].good is None:
            try:
                self._held.append(self._take())
            except EndOfEpoch:
                return None
        return self._held[-1].good

    def _moved(self, data: Value) -> Value:
        """Returns a batch of the host where the training loop wants it (pinned, or on its device)."""
        if self._pin_memory:
            data = pin(data, self._pin_memory_device)
        devices = self._devices
        return data if devices[0].type == "cpu" else to_device(data, devices[self._cursor.batches % len(devices)])

    def _go_on(self) -> None:
        """Notes that the training loop asks for more: the batch that raised before, if one did, counts as dealt with,
        and a resume leaves it out."""
        if self._failed is not None:
            self._cursor.delivered(self._failed, failed=self._failures.count, returned=False)
            self._failed = None

    def _end(self) -> None:
        """Notes that the training loop has seen the end of the epoch."""
        self._cursor.over = True


def _said_by(error: StopIteration) -> str:
    """Returns the message of the RuntimeError in place of a StopIteration, never empty. It says who raised that: a
    worker's error does so itself, others have a note."""
    notes = getattr(error, "__notes__", ())
    said = f"StopIteration ({notes[-1]}): {error}".removesuffix(": ") if notes else str(error)
    return said or "StopIteration was raised while a batch was handed over"


def to_device(batch: Value, device: torch.device) -> Value:
    """Returns a nested batch with its tensors on ``device`` and everything else as it is. Does not wait for copies."""
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))
