"""MinatoLoader's light and heavy step for speech, as work with a result: the utterance's main spectral direction.

The paper (MinatoLoader, EuroSys 2026, arXiv 2509.10712) adds to the speech pipeline a step of 0.5 s for every sample
and one of 3 or 10 s for every fifth. Here both are rounds of power iteration (von Mises and Pollaczek-Geiringer, 1929)
on the covariance of the mel bands; the heavy step goes on where the light one ended.

Decision: a step is so many rounds, not so many seconds, because content may not depend on the machine.
``rounds_for`` tells how many rounds a time is worth here. Rejected: sleeping, which takes no core.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minato_gpu.pipeline.pipeline import CupyFunction, Field, Stage, Tolerance
from minato_gpu.pipeline.stages import Fields, Params

_LEVEL = 2 / 255  # components of a unit vector, and about those of a covariance of features with deviation 1
_ROUNDING = {"cpu": Tolerance(0.01, 0.001), "cuda": Tolerance(0.1, 0.01)}
_SMALLEST = 1e-3  # a shorter product is rounding, of features with deviation 1: silence has no direction, all is 0


@dataclass(frozen=True)
class Steps:
    """Rounds of the light step for every sample, and of the heavy one for every ``every``-th.

    Raises ValueError for rounds below 0 or ``every`` below 1.
    """

    light_rounds: int
    heavy_rounds: int
    every: int = 5

    def __post_init__(self) -> None:
        if min(self.light_rounds, self.heavy_rounds) < 0 or self.every < 1:
            raise ValueError(f"rounds must be at least 0 and every at least 1, got {self}")

    def heavy(self, index: int) -> bool:
        """Returns whether the heavy step applies to this item: if ``every`` is 5, to the fifth, the tenth ..."""
        return index % self.every == self.every - 1


def stages(steps: Steps, mels: int) -> tuple[Stage, Stage]:
    """The stages "light" and "heavy": "features" (frames, splice * mels) and "index" to "direction" (mels,)."""
    direction = Field(np.float32, (mels,), level=_LEVEL)
    both_light = CupyFunction(partial(light, mels=mels, rounds=steps.light_rounds))
    both_heavy = CupyFunction(partial(heavy, steps=steps))
    return (
        Stage(
            "light",
            reads=("features",),
            writes={"covariance": Field(np.float32, (mels, mels), level=_LEVEL), "direction": direction},
            cpu=both_light.on_cpu,
            device=both_light,
            tolerance=_ROUNDING,
        ),
        Stage(
            "heavy",
            reads=("covariance", "direction", "index"),
            writes={"direction": direction},
            cpu=both_heavy.on_cpu,
            device=both_heavy,
            features=partial(cost_features, steps=steps),
            feature_names=("applies",),
            tolerance=_ROUNDING,
        ),
    )


def light(xp: ModuleType, fields: Fields, params: Params, *, mels: int, rounds: int) -> Fields:
    """The covariance of the mel bands over the frames, and its main direction after ``rounds`` rounds."""
    bands = xp.ascontiguousarray(fields["features"].reshape(-1, mels).T)
    bands = bands - bands.mean(axis=1, keepdims=True)
    # not by "@", for which NumPy starts BLAS's threads: a slot is one core
    covariance = xp.einsum("it,jt->ij", bands, bands) / xp.float32(bands.shape[1])
    start = xp.full(mels, mels**-0.5, xp.float32)
    return {"covariance": covariance, "direction": power_iteration(xp, covariance, start, rounds)}


def heavy(xp: ModuleType, fields: Fields, params: Params, *, steps: Steps) -> Fields:
    """The direction after the heavy step's further rounds, where it applies."""
    rounds = steps.heavy_rounds if steps.heavy(int(fields["index"])) else 0
    return {"direction": power_iteration(xp, fields["covariance"], fields["direction"], rounds)}


def power_iteration(xp: ModuleType, matrix: Any, direction: Any, rounds: int) -> Any:
    """``direction`` after so many rounds of multiplying by ``matrix`` and scaling to length 1: float32 (n,).

    Its sign is such that the components' sum is not negative. It dwindles to 0 for a matrix that is almost 0.
    """
    for _ in range(rounds):
        direction = matrix @ direction
        direction = direction / xp.maximum(xp.sqrt(direction @ direction), xp.float32(_SMALLEST))
    return xp.where(direction.sum() < 0, -direction, direction)


def cost_features(fields: Fields, *, steps: Steps) -> tuple[float, ...]:
    """Returns 1 where the heavy step applies, else 0."""
    return (float(steps.heavy(int(fields["index"]))),)


def rounds_for(seconds: float, mels: int = 80, *, trials: int = 5, probe: int = 20_000) -> int:
    """Returns the rounds, at least 1, that one core of this machine does in so many seconds.

    They are found by the median of ``trials`` of ``probe`` rounds each. For benchmarks: measure once, and let every
    loader do the same rounds.
    """
    bands = np.random.default_rng(0).standard_normal((mels, 4 * mels), np.float32)
    matrix = np.einsum("it,jt->ij", bands, bands)
    start = np.full(mels, mels**-0.5, np.float32)
    took = []
    for _ in range(trials):
        began = time.perf_counter()
        power_iteration(np, matrix, start, probe)
        took.append(time.perf_counter() - began)
    return max(1, round(seconds * probe / float(np.median(took))))
