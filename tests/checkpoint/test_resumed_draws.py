"""What streams draw from global generators in workers that stay, once such workers are started at a later epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from minato_gpu import DataLoader


class Draws(IterableDataset[Any]):
    """Yields what its worker draws, its seed, and what torch says the seed is."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        drawn = random.getrandbits(48), int(torch.randint(1 << 48, ()))
        yield torch.tensor([*drawn, info.seed >> 1, torch.initial_seed() >> 1])


def _loader() -> Any:
    return DataLoader(Draws(), batch_size=None, num_workers=1, persistent_workers=True)


def test_workers_that_start_after_a_resume_draw_something_new() -> None:
    loader = _loader()
    (first,), (second,) = list(loader), list(loader)
    resumed = _loader()
    resumed.load_state_dict(loader.state_dict())
    (third,) = list(resumed)
    drawn = {number for batch in (first, second, third) for number in batch[:2].tolist()}
    assert len(drawn) == 6
    assert first[2:].tolist() == third[2:].tolist(), "what a worker is told of its seed stays"
