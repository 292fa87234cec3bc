"""The loader under a virtual clock, with several devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from minato_gpu.scheduling.policy import Policy
from minato_gpu.simulation.virtual import VirtualLoader
from minato_gpu.simulation.work import Work


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("lateness", [0, 4])
@pytest.mark.parametrize("threshold", [True, False])
def test_several_devices(devices: int, lateness: int, threshold: bool) -> None:
    """In strict order nothing that a device has made goes to another, and each has its share of the work."""
    rng, samples = np.random.default_rng(devices), 960
    cost = rng.lognormal(0, 1, samples)
    cpu, device = 4e-3 * cost, 0.5e-3 + 0.5e-3 * cost
    work = Work(cpu, cpu, 16, (500, 460), 6, device, device, devices)
    policy = Policy(window=16 * 4 * devices, fixed=lateness == 0, max_lateness=lateness, devices=devices)
    loader = VirtualLoader(work, replace(policy, threshold=threshold))
    outcome = loader.run()
    assert sorted(outcome.serials) == list(range(samples))
    made = Counter(loader.made_on.values())
    assert sum(made.values()) > 100
    assert min(made.values()) > 0.6 * max(made.values())
    batches = np.repeat(np.arange(work.batches), work.sizes).tolist()
    homes = [f"device:{loader._intake.home(batch)}" for batch in batches]
    strayed = [loader.made_on.get(serial, home) != home for serial, home in zip(outcome.serials, homes, strict=True)]
    assert any(strayed) == (lateness > 0)
