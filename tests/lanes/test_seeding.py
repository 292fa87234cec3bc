"""Seeding per sample: draws are noticed, and repeat exactly."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from minato_gpu.lanes import seeding
from minato_gpu.lanes.produce import Job, Producer
from minato_gpu.lanes.seeding import Seeder, seed_generators, state_words
from minato_gpu.lanes.sharing import Sharing
from tests.lanes.harness import draws

pytestmark = pytest.mark.usefixtures("generators")


@pytest.fixture(autouse=True, params=["state looked at", "drawn from two"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How torch's generator is seen to move: by words of its state, or where these are not found."""
    if request.param == "drawn from two":
        monkeypatch.setattr(seeding, "state_words", lambda generator: None)


_DRAWS: dict[str, Callable[[], Any]] = {
    "random.gauss": lambda: random.gauss(0, 1),
    "numpy.random.randint": lambda: np.random.randint(5),
    "torch.randn of a million": lambda: torch.randn(1_000_000),
    "Tensor.random_": lambda: torch.empty(1).random_(),
    "torch.manual_seed": lambda: torch.manual_seed(1),
}


@pytest.mark.parametrize("act", _DRAWS.values(), ids=_DRAWS.keys())
def test_every_draw_in_an_unseeded_chunk_is_noticed(act: Callable[[], Any]) -> None:
    seeder = Seeder(3)
    assert seeder.begin_unseeded(100)
    act()
    assert seeder.moved()
    assert seeder.moved(), "asked again before the chunk is redone"
    assert not seeder.begin_unseeded(100), "from now on every sample is seeded"


@pytest.mark.parametrize("count", [1, 623, 624, 625, 1248])
def test_words_of_the_state_tell_every_draw(count: int) -> None:
    """The state is made anew after 624 numbers."""
    generator = torch.Generator().manual_seed(5)
    words = state_words(generator)
    assert words is not None, "torch's generator is laid out otherwise: draws are noticed, at more cost"
    before = bytes(words)
    generator.get_state()
    assert bytes(words) == before
    torch.empty(count, dtype=torch.int32).random_(generator=generator)
    assert bytes(words) != before
    generator.manual_seed(5)
    assert bytes(words) == before
    generator.manual_seed(6)
    assert bytes(words) != before


def test_short_chunks_are_seeded_until_their_samples_are_seen_not_to_draw() -> None:
    seeder = Seeder(3)
    assert seeder.begin_unseeded(8)
    for number in range(16):
        assert not seeder.begin_unseeded(7)
        seeder.seed(number)
        seeder.seeded_sample_done()
    assert seeder.begin_unseeded(1)
    random.random()
    assert seeder.moved()
    assert not seeder.begin_unseeded(1)


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_same_draws_whatever_came_before(seed: int) -> None:
    """First of all, after others that are looked at, after a chunk without seeds, with half a pair of normals left."""
    seed_generators(seed)
    expected = draws()
    for worker_seed in (0, 9):
        seeder = Seeder(worker_seed)
        for number in range(40):
            if number == 20:
                seeder.begin_unseeded(100)
                seeder.moved()
            seeder.seed(seed)
            assert draws() == expected
            random.gauss(0, 1)
            np.random.standard_normal()
            torch.randn(1)
            seeder.seeded_sample_done()


def test_a_sample_that_others_get_is_not_tried_without_its_seed() -> None:
    data: Any = range(100)
    producer = Producer(0, Job(data, default_collate, True, False, None, None, 1, 3, True))
    task: Any = SimpleNamespace(pieces=())
    assert producer.begin_unseeded(task, 100)
    producer.sharing = Sharing(*[None] * 2)  # type: ignore[arg-type]  # it is not asked
    assert not producer.begin_unseeded(task, 100)
