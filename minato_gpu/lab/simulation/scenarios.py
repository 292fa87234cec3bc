"""The named scenarios of the simulation: what costs what, on how many slots, in which windows, and what each shows.

Costs of the four workloads follow the table of preprocessing times in the MinatoLoader paper (EuroSys 2026, arXiv
2509.10712). Of detection and segmentation, minimum, median, 75th and 90th percentile and maximum are met exactly by
construction, the mean by the shape between them; costs of speech are uniform near half a second, and near ``heavy_s``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from minato_gpu.lab.simulation.work import Array, Cut, Work
from minato_gpu.samples import JSON

Costs = Callable[[np.random.Generator, int], tuple[Array, Array | None]]

Parts = Callable[[np.random.Generator, int], tuple[Array, Array, Array]]
"""Draws the seconds of each part of n samples on the CPU and on the device, shape (parts, n) each, and those that it
takes to bring to the device what there is before each part."""


@dataclass(frozen=True)
class Scenario:
    """A kind of work and the settings in which it is simulated: each of ``windows`` (samples), ``latenesses`` (batches)
    and ``errors`` (sigma of the log of predictions).

    ``costs(rng, n)`` draws the seconds of n samples on the CPU and, where there is one, the device. ``policy`` holds
    arguments of ``Policy`` that differ from its defaults. ``parts`` (see ``Parts``) replaces ``costs`` where
    samples can be cut. ``surprise`` (share, c, d): this share of the samples, at random, takes c times as long on the
    CPU and d times as long on the device, which no prediction knows. Other fields: see ``Work``.
    """

    name: str
    description: str
    costs: Costs
    batch: int
    epoch_samples: tuple[int, ...]
    slots: int
    windows: tuple[int, ...]
    devices: int = 0
    errors: tuple[float, ...] = (0.3,)
    latenesses: tuple[int, ...] = (0, 8)
    stagger_s: float = 0.0
    device_run_s: float = 0.0
    policy: Mapping[str, JSON] = field(default_factory=lambda: MappingProxyType({}))
    parts: Parts | None = None
    surprise: tuple[float, float, float] = (0.0, 1.0, 1.0)

    def work(self, seed: int, error: float) -> Work:
        """Returns the work of one seed. Prediction errors are log-normal of sigma ``error``, drawn by part and lane."""
        samples = sum(self.epoch_samples)
        cpu, device, moving = self._drawn(np.random.default_rng([seed, 1]), samples)
        noise = np.random.default_rng([seed, 2])
        told_cpu = cpu * np.exp(error * noise.standard_normal(cpu.shape))
        share, on_cpu, on_device = self.surprise
        slow = np.random.default_rng([seed, 3]).random(samples) < share
        cpu = cpu * np.where(slow, on_cpu, 1.0)
        work = Work(
            cpu=cpu.sum(axis=0),
            predicted_cpu=told_cpu.sum(axis=0),
            batch=self.batch,
            epoch_samples=self.epoch_samples,
            slots=self.slots,
            devices=self.devices,
            stagger_s=self.stagger_s,
            device_run_s=self.device_run_s,
        )
        if device is None:
            return work
        told_device = device * np.exp(error * noise.standard_normal(device.shape))
        device = device * np.where(slow, on_device, 1.0)
        whole, *cuts = [
            Cut(
                split,
                cpu[:split].sum(axis=0),
                device[split:].sum(axis=0) + moving[split],
                told_cpu[:split].sum(axis=0),
                told_device[split:].sum(axis=0) + moving[split],
            )
            for split in range(len(cpu))
        ]
        return replace(work, device=whole.device, predicted_device=whole.predicted_device, cuts=tuple(cuts))

    def _drawn(self, rng: np.random.Generator, samples: int) -> tuple[Array, Array | None, Array]:
        """Draws costs as ``Parts`` does; samples without split points have one part."""
        if self.parts is not None:
            return self.parts(rng, samples)
        cpu, device = self.costs(rng, samples)
        return cpu[None], None if device is None else device[None], np.zeros((1, samples))


def hybrid_costs(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """CPU 4 ms x, device (0.5 + 0.5 x) ms times an own factor of sigma 0.3, x log-normal of sigma 1."""
    x, factor = rng.lognormal(0.0, 1.0, n), rng.lognormal(0.0, 0.3, n)
    return 4e-3 * x, (0.5e-3 + 0.5e-3 * x) * factor


def two_part_costs(rng: np.random.Generator, n: int) -> tuple[Array, Array, Array]:
    """The sums of ``hybrid_costs`` in two parts: one that the device is not much better at (decoding), one that it is.

    CPU 2.4 ms x and 1.6 ms x; device (0.45 + 0.45 x) ms and (0.05 + 0.05 x) ms, each times an own factor of sigma 0.3;
    0.05 ms x to bring what the first part made to the device.
    """
    x, factors = rng.lognormal(0.0, 1.0, n), rng.lognormal(0.0, 0.3, (2, n))
    cpu = np.array([2.4e-3 * x, 1.6e-3 * x])
    device = np.array([0.45e-3 + 0.45e-3 * x, 0.05e-3 + 0.05e-3 * x]) * factors
    return cpu, device, np.array([np.zeros(n), 0.05e-3 * x])


def published_costs(
    quantiles: tuple[float, float, float, float, float], root: float, power: float
) -> Callable[[np.random.Generator, int], tuple[Array, None]]:
    """Costs with these (min, median, P75, P90, max), in milliseconds; no device.

    The quantile function is linear between the median and P90, a ``root`` below (most samples near the median) and a
    ``power`` above (most near P90), chosen for the published mean; the deviation comes within 5 %.
    """
    low, median, upper, high, top = quantiles

    def draw(rng: np.random.Generator, n: int) -> tuple[Array, None]:
        u = rng.random(n)
        parts = [
            low + (median - low) * np.clip(u / 0.5, 0, 1) ** (1 / root),
            median + (upper - median) * (u - 0.5) / 0.25,
            upper + (high - upper) * (u - 0.75) / 0.15,
        ]
        last = high + (top - high) * np.clip((u - 0.9) / 0.1, 0, 1) ** power
        return np.select([u < 0.5, u < 0.75, u < 0.9], parts, last) * 1e-3, None

    return draw


_DETECTION = published_costs((11, 28, 30, 35, 176), 2.75, 2.87)  # mean 31, deviation 19
_SEGMENTATION = published_costs((10, 470, 630, 750, 2230), 2.75, 13.32)  # mean 500; published deviation 197


def _speech(heavy_s: float) -> Costs:
    """About half a second for each sample; a random fifth of them take about ``heavy_s`` seconds in all."""

    def draw(rng: np.random.Generator, n: int) -> tuple[Array, Array | None]:
        heavy = rng.permutation(n) % 5 == 0
        return rng.uniform(0.502, 0.509, n) + heavy * (heavy_s - 0.5 + rng.uniform(0.0, 0.008, n)), None

    return draw


def _tail(rng: np.random.Generator, n: int) -> tuple[Array, Array | None]:
    return 3e-3 * rng.lognormal(0.0, 0.1, n) * np.where(rng.random(n) < 0.02, 60.0, 1.0), None


def _burst(rng: np.random.Generator, n: int) -> tuple[Array, Array | None]:
    slow = np.zeros(n, dtype=bool)
    for start in rng.choice(n // 24, n // 480, replace=False):
        slow[start * 24 : start * 24 + 24] = True
    return 3e-3 * rng.lognormal(0.0, 0.1, n) * np.where(slow, 20.0, 1.0), None


def _large(rng: np.random.Generator, n: int) -> tuple[Array, Array | None]:
    x, factor = rng.lognormal(0.0, 1.0, n), rng.lognormal(0.0, 0.3, n)
    return 20e-3 * x, (0.5e-3 + 2.5e-3 * x) * factor


_HYBRID = Scenario(
    "hybrid",
    "14 CPU slots and one device, 4,000 samples of log-normal size (the case of the design's table)",
    hybrid_costs,
    batch=64,
    epoch_samples=(4000,),
    slots=14,
    devices=1,
    windows=(128, 256),
    errors=(0.0, 0.3, 1.0),
    policy={"micro_batch": 1, "ahead_s": 2e-4},
)


def _on_cpu(name: str, description: str, costs: Costs, batch: int, samples: tuple[int, ...], *windows: int) -> Scenario:
    """Twelve workers, which start one by one, and no device."""
    return Scenario(name, description, costs, batch, samples, slots=12, windows=windows, stagger_s=5e-3)


_ALL = (
    _HYBRID,
    replace(
        _HYBRID,
        name="hybrid-cut",
        description="The same sums in two parts, decoding and the rest, which can be done on different lanes",
        parts=two_part_costs,
    ),
    replace(
        _HYBRID,
        name="surprise-cut",
        description="The same, but 1 % of the samples take 30 times as long on either lane, which nobody predicts",
        windows=(128,),
        errors=(0.3,),
        parts=two_part_costs,
        surprise=(0.01, 30.0, 30.0),
    ),
    _on_cpu(
        "object-detection",
        "COCO with Mask R-CNN's transforms: 31 ms on average, 11 to 176 ms, batch 48, 12 workers",
        *(_DETECTION, 48, (4800,), 1152),
    ),
    _on_cpu(
        "segmentation",
        "KiTS19 with 3D-UNet's transforms: 500 ms on average, 10 to 2,230 ms, batch 3, 12 workers",
        *(_SEGMENTATION, 3, (840,), 72),
    ),
    *(
        _on_cpu(
            f"speech-{heavy}s",
            f"LibriSpeech with RNN-T's transforms: half a second, every fifth sample {heavy} s, batch 24, 12 workers",
            *(_speech(float(heavy)), 24, (2400,), 576),
        )
        for heavy in (3, 10)
    ),
    _on_cpu(
        "tail",
        "2 % of the samples take 60 times as long as the others (3 ms), batch 64, 12 workers, small and usual window",
        *(_tail, 64, (6400,), 256, 1536),
    ),
    _on_cpu(
        "burst",
        "Slow samples (20 times 3 ms) come 24 in a row, twice the number of workers; batch 32, small and usual window",
        *(_burst, 32, (6400,), 256, 768),
    ),
    _on_cpu(
        "short-epochs",
        "40 epochs of 168 samples, batch 3, with KiTS19's costs: what starts and ends of epochs take",
        *(_SEGMENTATION, 3, (168,) * 40, 72),
    ),
    Scenario(
        "large",
        "128 CPU slots and 8 devices with micro-batches (0.4 ms each), batch 256, workers that start one by one",
        _large,
        batch=256,
        epoch_samples=(16384,),
        slots=128,
        devices=8,
        windows=(4096,),
        stagger_s=1e-3,
        device_run_s=0.4e-3,
        policy={"ahead_s": 5e-4},
    ),
)

SCENARIOS: Mapping[str, Scenario] = MappingProxyType({scenario.name: scenario for scenario in _ALL})
