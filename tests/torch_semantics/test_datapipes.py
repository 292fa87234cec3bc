"""PyTorch's data pipes: still part of its DataLoader, with sharding and shuffle settings applied by it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.graph_settings import apply_random_seed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.utils.data.datapipes.iter import IterableWrapper
    from torch.utils.data.datapipes.map import SequenceWrapper

from minato_gpu import DataLoader
from tests.contracts.resuming import saves_along
from tests.torch_semantics.datasets import as_lists, numbers_in


def test_stream_pipe(loader_class: Any) -> None:
    pipe = IterableWrapper(range(6)).map(_double)
    assert as_lists(loader_class(pipe, batch_size=4)) == [[0, 2, 4, 6], [8, 10]]


def _double(number: int) -> int:
    return 2 * number


def test_sharded_pipe(loader_class: Any, num_workers: int) -> None:
    pipe = IterableWrapper(range(10)).sharding_filter()
    assert sorted(numbers_in(loader_class(pipe, batch_size=2, num_workers=num_workers))) == list(range(10))


@pytest.mark.parametrize("shuffle", [True, False])
def test_shuffle_setting(loader_class: Any, num_workers: int, shuffle: bool) -> None:
    pipe = IterableWrapper(range(30)).shuffle().sharding_filter()
    loader = loader_class(pipe, shuffle=shuffle, num_workers=num_workers)
    torch.manual_seed(3)
    first = numbers_in(loader)
    assert sorted(first) == list(range(30))
    assert (first == list(range(30))) is not shuffle
    torch.manual_seed(3)
    assert numbers_in(loader) == first


def test_map_pipe(loader_class: Any, num_workers: int) -> None:
    pipe = SequenceWrapper(range(6))
    assert as_lists(loader_class(pipe, batch_size=4, num_workers=num_workers)) == [[0, 1, 2, 3], [4, 5]]


_WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "one": {"num_workers": 1},
    "one that stays": {"num_workers": 1, "persistent_workers": True},
    "two": {"num_workers": 2},
    "two that stay": {"num_workers": 2, "persistent_workers": True},
    "from a server": {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "forkserver"},
}


def _shuffled(loader_class: Any, **arguments: Any) -> Any:
    pipe = IterableWrapper(range(28)).shuffle(buffer_size=7).sharding_filter().shuffle()
    return loader_class(pipe, 2, **arguments)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("way", "own"), [*((way, False) for way in _WAYS), ("inline", True), ("one", True), ("two that stay", True)]
)
def test_every_epoch_has_the_order_that_pytorch_gives_it(way: str, own: bool) -> None:
    """After the same seed, and in the epochs that follow."""

    def orders(loader_class: Any) -> list[Any]:
        generator = torch.Generator() if own else torch.default_generator
        loader = _shuffled(loader_class, generator=generator if own else None, **_WAYS[way])
        found = []
        for seed in (123, 123, None, 5):
            if seed is not None:
                generator.manual_seed(seed)
            found.append(as_lists(loader))
        return [*found, generator.get_state().tolist()]

    first, second, *rest = orders(DataLoader)
    assert first == second != rest[0]
    assert [first, second, *rest] == orders(TorchDataLoader)


def test_threads_have_it_too() -> None:
    loader = _shuffled(DataLoader, num_workers=1, worker_kind="thread", persistent_workers=True)
    for _ in range(2):
        torch.manual_seed(123)
        expected = as_lists(_shuffled(TorchDataLoader))
        torch.manual_seed(123)
        assert as_lists(loader) == expected


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("way", ["inline", "one that stays", "two", "two that stay"])
def test_a_shuffled_pipe_goes_on(way: str, epoch: int) -> None:
    """It has no state, so it is read again: in the order that it had."""

    def make() -> Any:
        return _shuffled(DataLoader, generator=torch.Generator().manual_seed(7), **_WAYS[way])

    loader = make()
    for _ in range(epoch):
        list(loader)
    saves = saves_along(loader, 7)
    whole, _ = saves[-1]
    following = as_lists(loader)
    for first, state in saves:
        resumed = make()
        resumed.load_state_dict(state)
        assert as_lists(first) + as_lists(resumed) == as_lists(whole)
        assert as_lists(resumed) == following
    assert sorted(numbers_in(whole)) == list(range(28))


@pytest.mark.parametrize("seed", ["5", -1, 1 << 63, True])
def test_a_damaged_seed_is_refused(seed: Any) -> None:
    loader = _shuffled(DataLoader)
    next(iter(loader))
    state = loader.state_dict()
    state["source"]["shared_seed"] = seed
    with pytest.raises(ValueError, match="'shared_seed'"):
        _shuffled(DataLoader).load_state_dict(state)


def _reseeded(worker: int) -> None:
    """A ``worker_init_fn`` that sets another seed."""
    info: Any = torch.utils.data.get_worker_info()
    apply_random_seed(info.dataset, torch.Generator().manual_seed(worker))


def test_a_seed_that_worker_init_fn_sets() -> None:
    """It counts in the first epoch of a worker."""

    def order(loader_class: Any) -> Any:
        return as_lists(_shuffled(loader_class, num_workers=1, worker_init_fn=_reseeded))

    assert order(DataLoader) == order(DataLoader) == order(TorchDataLoader)
