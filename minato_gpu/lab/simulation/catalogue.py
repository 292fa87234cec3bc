"""The scenarios by name. Which costs, sizes and windows, and what each is there to show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from minato_gpu.lab.simulation.scenarios import Costs, Scenario, hybrid_costs, published_costs, two_part_costs
from minato_gpu.lab.simulation.work import Array

_DETECTION = published_costs((11, 28, 30, 35, 176), 31, 19)
_SEGMENTATION = published_costs((10, 470, 630, 750, 2230), 500, 197)


def _speech(heavy_s: float) -> Costs:
    """A light step of half a second; every fifth index, at random in the order, takes ``heavy_s`` more or less."""

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
_SPEECH_3S = Scenario(
    "speech-3s",
    "LibriSpeech with RNN-T's transforms: half a second, every fifth sample 3 s, batch 24, 12 workers",
    _speech(3.0),
    batch=24,
    epoch_samples=(2400,),
    slots=12,
    windows=(576,),
    stagger_s=5e-3,
)

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
    Scenario(
        "object-detection",
        "COCO with Mask R-CNN's transforms: 31 ms on average, 11 to 176 ms, batch 48, 12 workers",
        _DETECTION,
        batch=48,
        epoch_samples=(4800,),
        slots=12,
        windows=(1152,),
        stagger_s=5e-3,
    ),
    Scenario(
        "segmentation",
        "KiTS19 with 3D-UNet's transforms: 500 ms on average, 10 to 2,230 ms, batch 3, 12 workers",
        _SEGMENTATION,
        batch=3,
        epoch_samples=(840,),
        slots=12,
        windows=(72,),
        stagger_s=5e-3,
    ),
    _SPEECH_3S,
    replace(
        _SPEECH_3S,
        name="speech-10s",
        description="LibriSpeech with RNN-T's transforms: half a second, every fifth sample 10 s, batch 24, 12 workers",
        costs=_speech(10.0),
    ),
    Scenario(
        "tail",
        "2 % of the samples take 60 times as long as the others (3 ms), batch 64, 12 workers, small and usual window",
        _tail,
        batch=64,
        epoch_samples=(6400,),
        slots=12,
        windows=(256, 1536),
        stagger_s=5e-3,
    ),
    Scenario(
        "burst",
        "Slow samples (20 times 3 ms) come 24 in a row, twice the number of workers; batch 32, small and usual window",
        _burst,
        batch=32,
        epoch_samples=(6400,),
        slots=12,
        windows=(256, 768),
        stagger_s=5e-3,
    ),
    Scenario(
        "short-epochs",
        "40 epochs of 168 samples, batch 3, with KiTS19's costs: what starts and ends of epochs take",
        _SEGMENTATION,
        batch=3,
        epoch_samples=(168,) * 40,
        slots=12,
        windows=(72,),
        stagger_s=5e-3,
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
