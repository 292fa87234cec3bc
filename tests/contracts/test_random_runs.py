"""Random runs from a seed: modes, samplers, faults and resumes mixed as nobody would think of; P1 to P3 and P6 hold.

What is injected: samples that raise, samples that cost far more than others, samples of unequal shapes, and the run
given up at a random step and taken up by another loader with other workers. Not injected: killed or hung workers,
which the loader reports and does not replace.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from minato_gpu import DataLoader
from tests.contracts.datasets import Recorded

_RUNS = 24


class _Sampler:
    """The user's own: the remaining order must be stored."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.order))

    def __len__(self) -> int:
        return len(self.order)


class _Plan:
    """What one run is to be, drawn from its seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.samples = rng.randint(20, 90)
        self.batch = rng.choice([1, 3, 4, 8])
        self.bad = frozenset(rng.sample(range(self.samples), rng.choice([0, 0, 2, 5])))
        self.slow = frozenset(rng.sample(range(self.samples), 4))
        self.ragged = rng.random() < 0.3
        self.lateness = rng.choice([0, 0, 1, 3, 8])
        self.repeats = rng.random() < 0.4
        self.unknown = rng.random() < 0.3
        self.steps = [rng.randint(0, 6) for _ in range(rng.randint(0, 4))]
        self.workers = [rng.randint(1, 3) for _ in range(len(self.steps) + 1)]
        self.seed = seed

    def sampler(self) -> Any:
        generator = torch.Generator().manual_seed(self.seed)
        if not (self.unknown or self.repeats):
            return RandomSampler(range(self.samples), generator=generator)
        drawn = RandomSampler(range(self.samples), replacement=self.repeats, generator=generator)
        order = list(drawn)
        return _Sampler(order) if self.unknown else order

    def make(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError(f"sample {index} is broken")
        assert sum(range(100_000 if index in self.slow else 10)) >= 0
        drawn = torch.rand((), dtype=torch.float64).item()
        length = 1 + index % 3 if self.ragged else 1
        return torch.tensor([float(index), *[drawn] * length], dtype=torch.float64)

    def loader(self, workers: int, **more: Any) -> Any:
        arguments: dict[str, Any] = {"in_order": False, "max_lateness": self.lateness} if self.lateness else {}
        return DataLoader(
            _Data(self),  # type: ignore[arg-type]
            self.batch,
            sampler=self.sampler(),
            num_workers=workers,
            collate_fn=list if self.ragged else None,
            on_error="skip",
            generator=torch.Generator().manual_seed(self.seed + 1),
            **arguments,
            **more,
        )


class _Data:
    def __init__(self, plan: _Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.samples

    def __getitem__(self, index: int) -> Any:
        return self.plan.make(index)


def _samples(batches: Any) -> list[tuple[float, ...]]:
    return [tuple(sample.tolist()) for batch in batches for sample in batch]


@pytest.mark.parametrize("seed", range(_RUNS))
def test_nothing_is_lost(seed: int) -> None:
    plan = _Plan(seed)
    order = list(Recorded(plan.sampler()))
    reference = _samples(plan.loader(2))
    assert sorted(int(sample[0]) for sample in reference) == sorted(key for key in order if key not in plan.bad)
    received: list[tuple[float, ...]] = []
    state: Any = {}
    failed, late = 0, 0.0
    for steps, workers in zip([*plan.steps, None], plan.workers, strict=True):
        loader = plan.loader(workers)
        loader.load_state_dict(state)
        iterator = iter(loader)
        for batch in iterator if steps is None else (batch for _, batch in zip(range(steps), iterator, strict=False)):
            received += _samples([batch])
        state = json.loads(json.dumps(loader.state_dict()))
        stats = loader.stats()
        failed, late = failed + stats["samples_failed"], max(late, stats["lateness"]["max"])
        if not state["begun"]:
            break
    assert sorted(received) == sorted(reference)
    assert failed == sum(key in plan.bad for key in order)
    assert late <= plan.lateness
    if not plan.lateness:
        assert received == reference
