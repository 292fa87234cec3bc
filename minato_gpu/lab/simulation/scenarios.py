"""The named scenarios of the simulation: what costs what, on how many slots, in which windows.

Costs of the four workloads follow the table of preprocessing times in the MinatoLoader paper (EuroSys 2026, arXiv
2509.10712): minimum, median, 75th and 90th percentile and maximum are met exactly by construction, the mean by the
shape between them.
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
    """A kind of work and the settings in which it is simulated.

    ``costs(rng, n)`` draws the seconds of n samples on the CPU and, where there is one, the device. ``policy`` holds
    arguments of ``messages.Policy`` that differ from its defaults. ``parts`` (see ``Parts``) replaces ``costs`` where
    samples can be cut. ``surprise``: of those this share, at random, takes this many times as long in every part on the
    CPU, and this many times as long on the device, which no prediction knows.
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
        """The work of one seed, with log-normal prediction errors of sigma ``error``, apart for each part and lane."""
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
        """As ``Parts``; samples that cannot be cut have one part."""
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


def published_costs(quantiles: tuple[float, float, float, float, float], mean: float, std: float) -> Costs:
    """Costs with these (min, median, P75, P90, max), and near this mean and deviation, in milliseconds; no device.

    The quantile function is linear between the median and P90, a root below (most samples near the median) and a
    power above (most near P90). Root and power are found on a grid: of those that meet the mean, the nearest deviation.
    """
    low, median, upper, high, top = quantiles
    roots = np.linspace(1.0, 12.0, 221)[:, None]
    powers = np.linspace(0.0, 40.0, 4001)[None, :]
    below = low + (median - low) * roots / (roots + 1)
    above = high + (top - high) / (powers + 1)
    off = np.abs(0.5 * below + 0.125 * (median + upper) + 0.075 * (upper + high) + 0.1 * above - mean)
    chosen = np.argmin(off, axis=1)
    shapes = [(float(root), float(powers[0, at])) for root, at in zip(roots[:, 0], chosen, strict=True)]
    grid = (np.arange(4000) + 0.5) / 4000

    def value(u: Array, root: float, power: float) -> Array:
        parts = [
            low + (median - low) * np.clip(u / 0.5, 0, 1) ** (1 / root),
            median + (upper - median) * (u - 0.5) / 0.25,
            upper + (high - upper) * (u - 0.75) / 0.15,
        ]
        last = high + (top - high) * np.clip((u - 0.9) / 0.1, 0, 1) ** power
        return np.select([u < 0.5, u < 0.75, u < 0.9], parts, last)

    def misfit(shape: tuple[float, float]) -> float:
        costs = value(grid, *shape)
        return abs(float(costs.mean()) - mean) / mean + abs(float(costs.std()) - std) / std

    best = min(shapes[::5], key=misfit)

    def draw(rng: np.random.Generator, n: int) -> tuple[Array, Array | None]:
        return value(rng.random(n), *best) * 1e-3, None

    return draw
