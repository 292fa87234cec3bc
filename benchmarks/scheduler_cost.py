"""The events of runs by which the scheduler's decisions are counted (``tests/test_cost_gate.py``).

A simulated run (virtual clock, virtual lanes) records the events that the production scheduler hears; a fresh scheduler
can then hear the same events again, back to back.

Cases: costly samples (log-normal, 4 ms on the mean, decided on one by one) with the CPU lane alone and with a device
lane as well, and trivial samples (2 microseconds each, which travel in chunks); in order and at most eight batches
late.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Work
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler

_BATCH = 64


@dataclass(frozen=True)
class Case:
    """``kind`` is costly or trivial; ``devices`` device lanes; ``max_lateness`` in batches, 0 for strict order."""

    kind: str
    devices: int
    max_lateness: int

    @property
    def name(self) -> str:
        lanes = "CPU and device" if self.devices else "CPU"
        return f"{self.kind}, {lanes}"

    def work(self, samples: int) -> Work:
        """The simulated epoch, the same on every call."""
        rng = np.random.default_rng(1)
        if self.kind == "trivial":
            cost = np.full(samples, 2e-6)
            return Work(cost, cost, _BATCH, (samples,), slots=2)
        x = rng.lognormal(-0.5, 1.0, samples)  # mean 1
        cpu = 4e-3 * x
        error = rng.lognormal(0.0, 0.3, (2, samples))
        if not self.devices:
            return Work(cpu, cpu * error[0], _BATCH, (samples,), slots=14)
        device = (0.5e-3 + 0.5e-3 * x) * rng.lognormal(0.0, 0.3, samples)
        known = {"predicted_cpu": cpu * error[0], "predicted_device": device * error[1]}
        return Work(cpu, batch=_BATCH, epoch_samples=(samples,), slots=14, device=device, devices=self.devices, **known)

    def policy(self, window: int) -> Policy:
        """The policy in force, production's defaults otherwise."""
        return Policy(window=window, fixed=self.max_lateness == 0, max_lateness=self.max_lateness)


CASES = (
    Case("costly", 0, 0),
    Case("costly", 1, 0),
    Case("costly", 1, 8),
    Case("trivial", 0, 0),
    Case("trivial", 0, 8),
)


class _Recorder(Scheduler):
    """A scheduler that remembers what it heard."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.heard: list[m.Event] = []

    def handle(self, event: m.Event) -> list[m.Instruction]:
        self.heard.append(event)
        return super().handle(event)


def record(case: Case, window: int, samples: int) -> list[m.Event]:
    """The events of one simulated epoch of ``samples`` samples."""
    policy = case.policy(window)
    virtual = VirtualLoader(case.work(samples), policy)
    recorder = _Recorder(policy)
    virtual.scheduler = recorder
    virtual.run()
    return recorder.heard
