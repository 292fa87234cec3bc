"""What the scheduler's decisions cost: microseconds of one core for each sample, at two window sizes.

A simulated run (virtual clock, virtual lanes) records the events that the production scheduler hears; then a fresh
scheduler hears the same events again, back to back, and only that is timed, together with the two questions that the
loader's shell asks after every event (room in the window, time to wake). Nothing of the driver is in the figure.

Cases: costly samples (log-normal, 4 ms on the mean, decided on one by one) with the CPU lane alone and with a device
lane as well, and trivial samples (2 microseconds each, which travel in chunks); in order and at most eight batches
late.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import report
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Work
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler

WINDOWS = (256, 4096)
_BATCH = 64
_TARGET_US = {"costly": 20.0, "trivial": 1.0}


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


def replay_s(events: list[m.Event], policy: Policy) -> float:
    """Seconds that a fresh scheduler takes for the events, with the shell's questions after each."""
    scheduler = Scheduler(policy)
    gc.collect()
    start = time.perf_counter()
    for event in events:
        scheduler.handle(event)
        _ = scheduler.room
        scheduler.wake_at()
    return time.perf_counter() - start


def scheduler_rows(repetitions: int, quick: bool) -> list[dict[str, Any]]:
    """A row for each case and window: ``window``, ``scheduler_us_per_sample``, its spread, ``target_us_per_sample``."""
    runs = []
    for case in CASES:
        for window in WINDOWS:
            samples = (2 * window if quick else 20_000) if case.kind == "costly" else (8192 if quick else 400_000)
            runs.append((case, window, samples, record(case, window, samples)))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repetitions):
        for mine, (case, window, _, events) in zip(times, runs, strict=True):
            mine.append(replay_s(events, case.policy(window)))
    return [
        {
            "case": "scheduler's decisions",
            "loader": "minato_gpu scheduler alone",
            "samples": case.name,
            "order": "bounded" if case.max_lateness else "in order",
            "window": window,
            **report.summarise("scheduler_us_per_sample", [1e6 * seconds / samples for seconds in mine]),
            "events_per_sample": len(events) / samples,
            "target_us_per_sample": _TARGET_US[case.kind] if window == WINDOWS[0] or case.kind == "trivial" else None,
            "repetitions": repetitions,
        }
        for mine, (case, window, samples, events) in zip(times, runs, strict=True)
    ]
