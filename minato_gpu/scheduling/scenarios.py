"""The named scenarios of the simulation: what costs what, on how many slots, in which windows.

Costs of the four workloads follow the table of preprocessing times in the MinatoLoader paper (EuroSys 2026, arXiv
2509.10712): minimum, median, 75th and 90th percentile and maximum are met exactly by construction, the mean by the
shape between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from minato_gpu.scheduling.work import Array, Work

Costs = Callable[[np.random.Generator, int], tuple[Array, Array | None]]


@dataclass(frozen=True)
class Scenario:
    """A kind of work and the settings in which it is simulated.

    ``costs(rng, n)`` draws the seconds of n samples on the CPU and, where there is one, the device. ``policy`` holds
    arguments of ``messages.Policy`` that differ from its defaults.
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
    startup_s: float = 0.0
    stagger_s: float = 0.0
    device_run_s: float = 0.0
    policy: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def work(self, seed: int, error: float) -> Work:
        """The work of one seed, with log-normal prediction errors of sigma ``error``, drawn apart for each lane."""
        samples = sum(self.epoch_samples)
        cpu, device = self.costs(np.random.default_rng([seed, 1]), samples)
        noise = np.random.default_rng([seed, 2])
        told_cpu = cpu * np.exp(error * noise.standard_normal(samples))
        told_device = None if device is None else device * np.exp(error * noise.standard_normal(samples))
        return Work(
            cpu=cpu,
            predicted_cpu=told_cpu,
            batch=self.batch,
            epoch_samples=self.epoch_samples,
            slots=self.slots,
            device=device,
            predicted_device=told_device,
            devices=self.devices,
            startup_s=self.startup_s,
            stagger_s=self.stagger_s,
            device_run_s=self.device_run_s,
        )


def hybrid_costs(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """CPU 4 ms x, device (0.5 + 0.5 x) ms times an own factor of sigma 0.3, x log-normal of sigma 1."""
    x, factor = rng.lognormal(0.0, 1.0, n), rng.lognormal(0.0, 0.3, n)
    return 4e-3 * x, (0.5e-3 + 0.5e-3 * x) * factor


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
