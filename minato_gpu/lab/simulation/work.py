"""The work of a simulated run (true costs, predictions, batches, slots), and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from minato_gpu.scheduling.plans import Plan

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


LEARNED = 64  # samples of a lane from which its costs are predicted


@dataclass(frozen=True)
class Cut:
    """A split point: ``cpu`` seconds of each sample before it on the CPU, ``device`` seconds after it on the device."""

    split: int
    cpu: Array
    device: Array
    predicted_cpu: Array
    predicted_device: Array


@dataclass(frozen=True)
class Work:
    """One run of a simulated loader. Costs are seconds on one slot, one value per serial.

    ``device`` is None without a device lane. ``predicted_*`` are sent to the scheduler. ``epoch_samples`` is the
    number of samples of each epoch. ``stagger_s``: how much later than the one before each worker is ready, the first
    at once. ``device_run_s``: what each micro-batch costs on top of its samples; ``harm``: seconds that the
    consumer's step takes longer for each second of device work since the batch before. ``cuts``: split points, rising.
    ``header_s``: seconds that a worker takes to read the header of a sample, which the scheduler asks for; predictions
    are known no earlier, nor before their lane has prepared ``LEARNED`` samples. None: they are known from the start.
    """

    cpu: Array
    predicted_cpu: Array
    batch: int
    epoch_samples: tuple[int, ...]
    slots: int
    device: Array | None = None
    predicted_device: Array | None = None
    devices: int = 0
    stagger_s: float = 0.0
    device_run_s: float = 0.0
    harm: float = 0.0
    cuts: tuple[Cut, ...] = ()
    header_s: float | None = None

    def plans(self, serial: int) -> list[Plan]:
        """Returns the predictions for the serial's split points."""
        return [
            Plan(cut.split, float(cut.predicted_cpu[serial]), float(cut.predicted_device[serial])) for cut in self.cuts
        ]

    @cached_property
    def sizes(self) -> Integers:
        """Size of each batch, all epochs in a row."""
        sizes: list[int] = []
        for samples in self.epoch_samples:
            full, rest = divmod(samples, self.batch)
            sizes += [self.batch] * full + [rest] * (rest > 0)
        return np.array(sizes)

    @cached_property
    def firsts(self) -> Integers:
        """First serial of each batch, and the number of serials as the last element."""
        return np.concatenate(([0], np.cumsum(self.sizes)))

    @cached_property
    def epochs(self) -> Integers:
        """Epoch of each batch."""
        counts = [-(-samples // self.batch) for samples in self.epoch_samples]
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def begins(self) -> list[int]:
        """The first batch of each batch's epoch."""
        begins: list[int] = np.searchsorted(self.epochs, self.epochs).tolist()
        return begins

    @property
    def batches(self) -> int:
        return len(self.sizes)

    def steps(self, period: float | Sequence[float]) -> list[float]:
        """Returns the seconds that the consumer takes for each batch: ``period``, or one for each, all epochs in a
        row."""
        return [period] * self.batches if isinstance(period, (int, float)) else list(period)

    def ready_times(self) -> list[float]:
        """Returns the seconds at which each CPU worker is ready for its first chunk."""
        return [i * self.stagger_s for i in range(self.slots)]

    def places(self, serials: Integers) -> Integers:
        """The batch of the sampler's order that each serial belongs to."""
        found: Integers = np.searchsorted(self.firsts, serials, side="right") - 1
        return found


@dataclass(frozen=True)
class Outcome:
    """The seconds at which each batch was handed over, shape (batches,), and the serials in order of delivery."""

    times: Array
    serials: Integers

    @property
    def first_batch_s(self) -> float:
        return float(self.times[0])

    @property
    def makespan_s(self) -> float:
        return float(self.times[-1])
