"""The loader as an object: its class, subclasses, pickles, and re-creation from its attributes."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import minato_gpu
from tests.contracts.datasets import Made
from tests.torch_semantics.datasets import Numbers, as_lists, keep


def test_is_a_pytorch_loader(loader_class: Any) -> None:
    loader = loader_class(Numbers(3))
    assert isinstance(loader, DataLoader)
    assert issubclass(loader_class, DataLoader)
    assert not isinstance(loader, Iterator)


def test_class_takes_a_type_argument(loader_class: Any) -> None:
    assert as_lists(loader_class[int](Numbers(2))) == [[0], [1]]


def _recreated(loader: Any, **replaced: Any) -> Any:
    """Rebuild a loader as training frameworks do: from the plain attributes that are named like arguments."""
    kept = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    kept["multiprocessing_context"] = loader.multiprocessing_context
    kept.update(replaced)
    names = inspect.signature(type(loader).__init__).parameters
    if kept["batch_sampler"] is not None:
        kept = {**kept, "batch_size": 1, "sampler": None, "drop_last": False}
    return type(loader)(**{name: value for name, value in kept.items() if name in names})


def test_every_argument_is_a_plain_attribute(loader_class: Any) -> None:
    loader = loader_class(Numbers(3), num_workers=1)
    names = set(inspect.signature(loader_class.__init__).parameters) - {"self", "shuffle", "multiprocessing_context"}
    assert names <= set(vars(loader))


def test_recreation_with_another_sampler(loader_class: Any) -> None:
    original = loader_class(Numbers(8), batch_size=3, num_workers=1, collate_fn=keep, in_order=False, timeout=30)
    mirrored = BatchSampler(range(7, -1, -1), 4, False)
    loader = _recreated(original, batch_sampler=mirrored)
    assert type(loader) is loader_class
    assert sorted(tuple(map(int, batch)) for batch in loader) == [(3, 2, 1, 0), (7, 6, 5, 4)]
    for name in ("num_workers", "collate_fn", "in_order", "timeout", "prefetch_factor", "dataset"):
        assert getattr(loader, name) is getattr(original, name)


def test_subclass_that_overrides_and_sets_attributes_first(loader_class: Any) -> None:
    class Subclass(loader_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.epochs_begun = 0
            super().__init__(*args, **kwargs)

        def __iter__(self) -> Iterator[Any]:
            self.epochs_begun += 1
            for batch in super().__iter__():
                yield batch + 1

    for workers in (0, 1):
        loader = Subclass(Made(4, lambda index: 2 * index), batch_size=2, num_workers=workers)
        assert [as_lists(loader), as_lists(loader)] == [[[1, 3], [5, 7]]] * 2
        assert (loader.epochs_begun, len(loader)) == (2, 2)
        with pytest.raises(ValueError, match=r"^batch_size attribute should not be set after Subclass is initialized"):
            loader.batch_size = 7


@pytest.mark.parametrize("clone", [lambda it: pickle.loads(pickle.dumps(it)), copy.deepcopy, copy.copy])
def test_a_loader_can_be_pickled_and_copied(loader_class: Any, clone: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    original = loader_class(Numbers(6), 2, True, num_workers=1, generator=generator, persistent_workers=True)
    other = clone(original)
    other.generator.manual_seed(3)
    other.sampler.generator.manual_seed(3)
    received = as_lists(other)
    generator.manual_seed(3)
    assert received == as_lists(original)
    assert (other.num_workers, other.persistent_workers, other.prefetch_factor) == (1, True, 2)
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        other.batch_size = 3


def test_a_pickled_loader_after_an_epoch(loader_class: Any, num_workers: int) -> None:
    original = loader_class(Numbers(6), 2, num_workers=num_workers)
    list(original)
    assert as_lists(pickle.loads(pickle.dumps(original))) == [[0, 1], [2, 3], [4, 5]]


def test_iterators_cannot_be_pickled(loader_class: Any, num_workers: int) -> None:
    iterator = iter(loader_class(Numbers(4), num_workers=num_workers))
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iterator)


def test_the_names_that_libraries_build_on(loader_class: Any) -> None:
    loader = loader_class(Numbers(4), batch_size=2)
    assert loader._index_sampler is loader.batch_sampler
    assert loader._auto_collation is True
    unbatched = loader_class(Numbers(4), batch_size=None)
    assert unbatched._index_sampler is unbatched.sampler
    assert isinstance(unbatched._index_sampler, SequentialSampler)
    assert unbatched._auto_collation is False


@pytest.mark.parametrize("clone", [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_loader_goes_on_from_the_state_that_waits_in_it(clone: Callable[[Any], Any]) -> None:
    """So does the copy's copy, and the loader itself; the epoch after that is a whole one."""
    first: Any = minato_gpu.DataLoader(Numbers(12), 4)
    iterator = iter(first)
    next(iterator)
    loader: Any = minato_gpu.DataLoader(Numbers(12), 4)
    loader.load_state_dict(first.state_dict())
    copied = clone(loader)
    state = copied.state_dict()
    for each in (clone(copied), copied, loader):
        assert each.state_dict() == state
        assert [len(list(each)) for _ in range(2)] == [2, 3]
