"""Random orders and random states: reproducible, and the generators end where PyTorch's loader leaves them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, default_collate

from tests.contracts.datasets import Made
from tests.torch_semantics.datasets import Numbers, Stream, as_lists, numbers_in


def _generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("source", ["own generator", "global generator", "sampler with its own", "nothing is drawn"])
def test_order_and_generator_state_are_pytorchs(loader_class: Any, workers: int, persistent: bool, source: str) -> None:
    def epochs(kind: Any) -> list[Any]:
        data = Numbers(30)
        torch.manual_seed(11)
        generator = _generator() if "own" in source else None
        order: dict[str, Any] = {"shuffle": source != "nothing is drawn"}
        if source == "sampler with its own":
            order = {"sampler": RandomSampler(data, replacement=True, num_samples=70, generator=generator)}
            generator = None
        loader = kind(data, 4, num_workers=workers, generator=generator, persistent_workers=persistent, **order)
        states = []
        for _ in range(3):
            batches = as_lists(loader)
            own = loader.generator if loader.generator is not None else getattr(loader.sampler, "generator", None)
            states.append((batches, torch.get_rng_state().tolist(), own.get_state().tolist() if own else None))
        return states

    assert epochs(loader_class) == epochs(DataLoader)


def test_generator_state_after_an_early_break(loader_class: Any, num_workers: int) -> None:
    def state(kind: Any) -> Any:
        generator = _generator()
        loader = kind(Numbers(64), 4, shuffle=True, num_workers=num_workers, generator=generator)
        taken = as_lists(itertools.islice(loader, 2))
        return taken, generator.get_state().tolist()

    assert state(loader_class) == state(DataLoader)


def test_generator_state_of_a_stream(loader_class: Any, num_workers: int) -> None:
    generator, expected = _generator(), _generator()
    list(loader_class(Stream(5), num_workers=num_workers, generator=generator))
    torch.empty((), dtype=torch.int64).random_(generator=expected)
    assert torch.equal(generator.get_state(), expected.get_state())


def _drawn(index: int) -> Any:
    return [index, random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_without_workers_a_loop_body_shares_the_generators(loader_class: Any) -> None:
    """The data set draws between the draws of the loop body, batch by batch, and nothing is drawn ahead."""
    torch.manual_seed(2)
    loop = [(float(batch[3][0]), float(torch.rand(()))) for batch in loader_class(Made(4, _drawn))]
    torch.manual_seed(2)
    torch.empty((), dtype=torch.int64).random_()
    assert loop == [(float(default_collate([_drawn(i)])[3]), float(torch.rand(()))) for i in range(4)]


def test_another_seed_other_draws(loader_class: Any) -> None:
    runs = [next(iter(loader_class(Made(4, _drawn), 4, num_workers=1, generator=_generator(seed)))) for seed in (1, 2)]
    assert runs[0][0].tolist() == runs[1][0].tolist()
    assert all(not set(one.tolist()) & set(two.tolist()) for one, two in zip(runs[0][1:], runs[1][1:], strict=True))


def test_seeds_seen_by_the_data_set_differ_by_worker_and_repeat_with_the_generator(loader_class: Any) -> None:
    """PyTorch's own check: as many samples as workers, one seed each."""
    data = Made(2, lambda index: torch.tensor(torch.initial_seed()))

    def seeds() -> set[int]:
        return set(numbers_in(loader_class(data, num_workers=2, generator=_generator(42))))

    assert len(seeds()) == 2
    assert seeds() == seeds()


class _Draws(Stream):
    """What a worker's global generators say as its stream begins."""

    def __iter__(self) -> Any:
        yield torch.tensor([random.random(), np.random.rand(), torch.rand(()).item(), _at_start[0]])


_at_start = [0.0]


def _note_numpy(worker: int) -> None:
    _at_start[0] = float(np.random.get_state()[1][5])  # type: ignore[index]


def test_a_workers_generators_begin_as_pytorchs(loader_class: Any) -> None:
    """What ``worker_init_fn`` finds, and what a stream draws."""
    got = []
    for kind in (loader_class, DataLoader):
        arguments: dict[str, Any] = {"worker_init_fn": _note_numpy, "generator": _generator()}
        got.append([batch.tolist() for batch in kind(_Draws(4), batch_size=None, num_workers=2, **arguments)])
    assert got[0] == got[1] and len(got[0]) == 2
