"""Own batch types, sparse tensors, gradients, and pinned memory."""

from __future__ import annotations

import collections
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from tests.contracts.datasets import Made
from tests.support.raising import error_of
from tests.support.same import same
from tests.torch_semantics.datasets import Numbers, keep


class OwnBatch:
    """A batch type with its own ``pin_memory``."""

    def __init__(self, samples: list[Any]) -> None:
        self.numbers = torch.stack([torch.as_tensor(sample) for sample in samples])
        self.pinned = False

    def pin_memory(self) -> OwnBatch:
        self.numbers = self.numbers.pin_memory()
        self.pinned = True
        return self


def test_own_batch_type(loader_class: Any, num_workers: int) -> None:
    batches = list(loader_class(Numbers(5), 2, num_workers=num_workers, collate_fn=OwnBatch))
    assert [type(batch) for batch in batches] == [OwnBatch] * 3
    assert [batch.numbers.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


def _array_of(kind: str, file: Path) -> Any:
    array: Any = np.arange(12, dtype=np.float32).reshape(6, 2)
    if kind == "memmap":
        array.tofile(file)
        return np.memmap(file, np.float32, "r+", shape=(6, 2))
    if kind == "masked":
        return np.ma.masked_array(array, array > 2)
    if kind == "mixed":
        return [row.view(np.memmap) if at % 2 else row for at, row in enumerate(array)]
    return array.view({"matrix": np.matrix, "record array": np.recarray}[kind])


@pytest.mark.parametrize("kind", ["memmap", "masked", "matrix", "record array", "mixed"])
def test_rows_of_a_subclass_of_arrays(loader_class: Any, num_workers: int, kind: str, tmp_path: Path) -> None:
    rows = _array_of(kind, tmp_path / "rows")
    batches = list(loader_class(Made(6, rows.__getitem__), 2, num_workers=num_workers))
    assert same(batches, [default_collate([rows[at], rows[at + 1]]) for at in (0, 2, 4)])


def _small(at: int) -> dict[str, Any]:
    numbers = torch.full((4,), float(at))
    return {"x": numbers.double() if at == 21 else numbers, "n": at}


def test_small_tensors_one_of_which_has_another_dtype(loader_class: Any, num_workers: int) -> None:
    """Workers stack what is cheap together; PyTorch's, too, write into memory of the first sample's dtype."""
    batches = list(loader_class(Made(32, _small), 8, num_workers=num_workers))
    assert [batch["x"].dtype for batch in batches] == [torch.float32] * 2 + [
        torch.float32 if num_workers else torch.float64
    ] + [torch.float32]
    found = torch.cat([batch["x"] for batch in batches])
    assert found[:, 0].tolist() == torch.cat([batch["n"] for batch in batches]).tolist() == list(range(32))


def test_rows_that_a_function_of_the_users_own_joins_keep_their_class(loader_class: Any, num_workers: int) -> None:
    rows = np.ma.masked_array(np.arange(6.0).reshape(3, 2), np.array([[False, True]] * 3))
    loader = loader_class(Made(3, rows.__getitem__), 3, num_workers=num_workers, collate_fn=_filled)
    assert [batch.tolist() for batch in loader] == [[[0, -1], [2, -1], [4, -1]]]


def _filled(samples: list[Any]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(sample.filled(-1)) for sample in samples])


def _last(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).to(memory_format=torch.channels_last)


def _as_is(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return samples


_COLLATING: dict[str, dict[str, Any]] = {
    "no batches": {"batch_size": None},
    "lists": {"collate_fn": _as_is},
    "channels last": {"collate_fn": _last},
}


@pytest.mark.parametrize("collating", _COLLATING)
def test_the_order_in_memory_stays(loader_class: Any, num_workers: int, collating: str) -> None:
    """A model on channels last would be slower, and sums differ in their last bits."""
    pictures = Made(4, lambda i: torch.full((6, 5, 3), float(i)).permute(2, 0, 1))
    for batch in loader_class(pictures, num_workers=num_workers, **_COLLATING[collating]):
        picture = batch[0] if isinstance(batch, list) or batch.ndim == 4 else batch
        assert (picture.shape, picture.stride()) == ((3, 6, 5), (1, 15, 3))


_LAYOUTS: dict[str, Any] = {
    "COO": lambda i: torch.eye(3, 4).to_sparse() * i,
    "COO with repeats": lambda i: torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, i]), (3, 4), check_invariants=True
    ),
    "CSR": lambda i: (torch.eye(3) * i).to_sparse_csr(),
    "CSC": lambda i: (torch.eye(3) * i).to_sparse_csc(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("how", ["own collate", "no batching"])
def test_sparse_tensors(loader_class: Any, num_workers: int, layout: str, how: str) -> None:
    make = _LAYOUTS[layout]
    if how == "own collate":
        loader = loader_class(Made(4, make), 2, num_workers=num_workers, collate_fn=keep)
        received = [sample for batch in loader for sample in batch]
    else:
        received = list(loader_class(Made(4, make), batch_size=None, num_workers=num_workers))
    assert len(received) == 4
    assert all(same(got, make(index)) for index, got in enumerate(received))


def test_gradients_without_workers(loader_class: Any) -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    batch = next(iter(loader_class(Made(2, lambda i: weight * (i + 1)), 2)))
    batch.sum().backward()
    assert weight.grad is not None and float(weight.grad) == 3.0


def test_leaf_tensors_that_require_gradients_through_workers(loader_class: Any) -> None:
    data = Made(3, lambda i: torch.full((2,), float(i), requires_grad=True))
    received = list(loader_class(data, batch_size=None, num_workers=1))
    assert [(sample.requires_grad, sample.is_leaf, sample.tolist()) for sample in received] == [
        (True, True, [float(i)] * 2) for i in range(3)
    ]


def test_stacking_gradients_in_workers_is_an_error(loader_class: Any) -> None:
    data = Made(4, lambda i: torch.full((2,), float(i), requires_grad=True))
    text = str(error_of(RuntimeError, list, loader_class(data, 2, num_workers=1)))
    assert "don't support automatic differentiation" in text


def test_parameters_and_tensor_attributes_of_an_own_type(loader_class: Any, num_workers: int) -> None:
    """One storage referred to twice in a batch stays one storage."""

    def collate(samples: list[Any]) -> dict[str, Any]:
        whole = torch.stack(samples)
        return {"whole": whole, "first": whole[0]}

    data = Made(4, lambda i: torch.full((3,), float(i)))
    for batch in loader_class(data, 2, num_workers=num_workers, collate_fn=collate):
        batch["whole"][0, 0] = -5.0
        assert float(batch["first"][0]) == -5.0


def test_samples_of_one_storage_are_copied_into_the_batch(loader_class: Any, num_workers: int) -> None:
    storage = torch.zeros(10)
    batch = next(iter(loader_class(Made(4, lambda i: storage[i : i + 2]), 4, num_workers=num_workers)))
    batch.fill_(1.0)
    assert float(storage.sum()) == 0.0


_ACCELERATOR = torch.accelerator.is_available()


@pytest.mark.skipif(_ACCELERATOR, reason="an accelerator can pin memory")
def test_pinning_without_an_accelerator_warns_once_per_epoch(loader_class: Any, num_workers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = loader_class(Numbers(4), 2, num_workers=num_workers, pin_memory=True)
    for _ in range(2):
        with pytest.warns(UserWarning, match="^'pin_memory' argument is set as true but no accelerator") as caught:
            batches = list(loader)
        told = [each for each in caught if each.category is not DeprecationWarning]  # Python 3.12 gives one for a fork
        assert len(told) == 1
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]
        assert not any(batch.is_pinned() for batch in batches)
    assert loader.pin_memory is True


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_pin_memory_device_is_deprecated(loader_class: Any) -> None:
    loader = loader_class(Numbers(2), pin_memory=True, pin_memory_device="cuda")
    with pytest.warns(UserWarning, match="^pin_memory_device is deprecated"):
        assert len(list(loader)) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_pinned(loader_class: Any, persistent: bool) -> None:
    data = Made(4, lambda i: {"a": (torch.tensor([i]), "text"), "b": collections.OrderedDict(c=torch.tensor(i))})
    loader = loader_class(data, 2, num_workers=1, pin_memory=True, persistent_workers=persistent)
    for batch in loader:
        assert batch["a"][0].is_pinned() and batch["b"]["c"].is_pinned()
        assert batch["a"][1] == ("text", "text")


@pytest.mark.gpu
def test_own_pin_memory_is_called(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Numbers(4), 2, num_workers=num_workers, pin_memory=True, collate_fn=OwnBatch)
    assert [(batch.pinned, batch.numbers.is_pinned()) for batch in loader] == [(True, True)] * 2
