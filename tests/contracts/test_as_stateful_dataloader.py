"""What torchdata documents of its ``StatefulDataLoader``, as a table: a program for it runs with this loader.

The rows are checked with torchdata's own loader too, without workers, so that the table says what is true of it, but
for what it does not keep: with a ``generator``, the order of the epochs after a resume; and, where a stream without a
state is resumed twice, the place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from tests.contracts.datasets import Counts, Made, Streams
from tests.torch_semantics.datasets import as_lists

torchdata: Any = pytest.importorskip("torchdata.stateful_dataloader")

Make = Callable[[], Any]
_SIZES = [11, 9]


def _map(sizes: list[int]) -> Any:
    return Made(sum(sizes), torch.tensor)


_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "in order": (_map, {}),
    "shuffled": (_map, {"shuffle": True}),
    "stream": (Streams, {}),
    "stream with a state": (Counts, {}),
}
_WORKERS = {"num_workers": 2, "snapshot_every_n_steps": 3}
_LOADERS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "torchdata": (torchdata.StatefulDataLoader, {}, list(_KINDS)),
    "inline": (DataLoader, {}, list(_KINDS)),
    "workers": (DataLoader, _WORKERS, ["shuffled", "stream"]),
    "workers that stay": (DataLoader, {**_WORKERS, "persistent_workers": True}, ["shuffled", "stream with a state"]),
}


def _resumed(make: Make, state: Any) -> Any:
    loader = make()
    loader.load_state_dict(state)
    return loader


def _after(loader: Any, steps: int) -> tuple[list[Any], Any]:
    """So many batches of an epoch, and the state after them."""
    iterator = iter(loader)
    got = as_lists(next(iterator) for _ in range(steps))
    return got, loader.state_dict()


# --- the table ---------------------------------------------------------------------------------------------------
# ``epochs``: what an uninterrupted run delivers


def at_every_step_of_one_run(make: Make, epochs: list[Any]) -> None:
    loader = make()
    got: list[Any] = []
    for batch in loader:
        got.append(batch.tolist())
        if len(got) % 3 == 1:
            assert got + as_lists(_resumed(make, loader.state_dict())) == epochs[0]


def after_the_last_batch(make: Make, epochs: list[Any]) -> None:
    """Nothing is left of the epoch; the next one is whole."""
    _, state = _after(make(), len(epochs[0]))
    resumed = _resumed(make, state)
    assert as_lists(resumed) == []
    assert as_lists(resumed) == epochs[1]


def left_by_break(make: Make, epochs: list[Any]) -> None:
    """The state is that of the place; the next ``iter()`` of this loader begins an epoch."""
    loader = make()
    for _ in loader:
        break
    state = loader.state_dict()
    if type(loader.dataset) is not Counts:  # which goes on where it is
        assert len(as_lists(loader)) == len(epochs[0])
    assert epochs[0][:1] + as_lists(_resumed(make, state)) == epochs[0]


def the_loader_that_was_saved(make: Make, epochs: list[Any]) -> None:
    loader = make()
    got, state = _after(loader, 3)
    loader.load_state_dict(state)
    assert got + as_lists(loader) == epochs[0]


def a_state_is_not_changed_later(make: Make, epochs: list[Any]) -> None:
    loader = make()
    iterator = iter(loader)
    got = as_lists(next(iterator) for _ in range(3))
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    list(iterator)
    assert str(state) == str(kept)
    assert got + as_lists(_resumed(make, state)) == got + as_lists(_resumed(make, state)) == epochs[0]


def an_empty_state(make: Make, epochs: list[Any]) -> None:
    assert as_lists(_resumed(make, {})) == epochs[0]


def its_length(make: Make, epochs: list[Any]) -> None:
    """Is that of an epoch, also of one that is resumed."""
    loader = make()
    if hasattr(loader.dataset, "__len__"):
        resumed = _resumed(make, _after(loader, 3)[1])
        assert len(loader) == len(resumed) == len(epochs[0])
        list(resumed)
        assert len(resumed) == len(epochs[0])
    else:
        with pytest.raises(TypeError):
            len(loader)


_ROWS = [
    at_every_step_of_one_run,
    after_the_last_batch,
    left_by_break,
    the_loader_that_was_saved,
    a_state_is_not_changed_later,
    an_empty_state,
    its_length,
]


_NOT_THEIRS = {"shuffled": [after_the_last_batch]}
_CASES = [
    (row, loader, kind)
    for loader, (_, _, kinds) in _LOADERS.items()
    for kind in kinds
    for row in _ROWS
    if loader != "torchdata" or row not in _NOT_THEIRS.get(kind, [])
]


@pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")
@pytest.mark.each_value
@pytest.mark.parametrize(("row", "loader", "kind"), _CASES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_as_documented(row: Callable[[Make, list[Any]], None], loader: str, kind: str) -> None:
    """Each row of the table."""
    loader_class, arguments, _ = _LOADERS[loader]
    dataset, more = _KINDS[kind]
    sizes = _SIZES if arguments else [sum(_SIZES)]

    def make() -> Any:
        return loader_class(
            dataset(sizes), **{"batch_size": 2, "generator": torch.Generator().manual_seed(17), **arguments, **more}
        )

    whole = make()
    row(make, [as_lists(whole) for _ in range(3)])
