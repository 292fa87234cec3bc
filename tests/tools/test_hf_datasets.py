"""Hugging Face's ``datasets`` as a source: rows are fetched many at a time, by ``__getitems__``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from tests.contracts.modes import BOUNDED_8, IN_ORDER, MINATO, Mode
from tests.support.waiting import wait_until

ROWS, BATCH = 60, 8


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Numbers and texts, in a file that is mapped into memory, as tensors."""
    import datasets

    made = datasets.Dataset.from_dict({"label": list(range(ROWS)), "text": [f"row {n}" for n in range(ROWS)]})
    made = made.add_column("x", [[float(n)] * 5 for n in range(ROWS)])
    path = str(tmp_path_factory.mktemp("datasets") / "rows")
    made.save_to_disk(path)
    return datasets.load_from_disk(path).with_format("torch")


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_the_same_batches_as_pytorchs(dataset: Any, mode: Mode, workers: int) -> None:
    theirs = list(torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, generator=_generator()))
    mine = list(mode.loader(dataset, BATCH, shuffle=True, generator=_generator(), num_workers=workers))
    labels = [int(n) for batch in mine for n in batch["label"]]
    assert sorted(labels) == list(range(ROWS))
    for batch in mine:
        assert batch["text"] == [f"row {int(n)}" for n in batch["label"]]
        assert torch.equal(batch["x"], batch["label"][:, None].float().expand(-1, 5))
    if not mode.lateness:
        for one, other in zip(mine, theirs, strict=True):
            assert one["text"] == other["text"] and one["x"].dtype == other["x"].dtype
            assert torch.equal(one["x"], other["x"]) and torch.equal(one["label"], other["label"])


def test_rows_are_fetched_together(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the data set's own method, in chunks that the loader cuts."""
    asked: list[list[int]] = []
    inner = type(dataset).__getitems__

    def counted(self: Any, keys: list[int]) -> Any:
        asked.append(list(keys))
        return inner(self, keys)

    monkeypatch.setattr(type(dataset), "__getitems__", counted)
    loader = DataLoader(dataset, BATCH, num_workers=1, worker_kind="thread", persistent_workers=True)

    epochs = 0

    def together() -> bool:
        nonlocal epochs
        assert [int(n) for batch in loader for n in batch["label"]] == list(range(ROWS))
        epochs += 1
        times = Counter(key for keys in asked for key in keys)
        assert sorted(times) == list(range(ROWS))
        assert set(times.values()) <= {epochs, epochs + 1}, "a worker that persists begins the next epoch ahead"
        return max(map(len, asked)) > 1

    assert wait_until(together), "in no epoch, though on a busy machine the first may have shown slow rows"


@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_resume(dataset: Any, mode: Mode) -> None:
    def make() -> Any:
        return mode.loader(dataset, BATCH, shuffle=True, generator=_generator(), num_workers=2)

    loader = make()
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert sorted(int(n) for batch in (*first, *resumed) for n in batch["label"]) == list(range(ROWS))
