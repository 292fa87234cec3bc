"""Loaders like the one that is analysed have its arguments, its batches, and nothing that would touch it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

import minato_gpu
from minato_gpu.analysis.subject import Subject
from minato_gpu.analysis.watching import Watched


def tenfold(samples: list[int]) -> Any:
    return default_collate([10 * sample for sample in samples])


class Pairs:
    """A batch sampler of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[3, 4], [0, 1, 2]])

    def __len__(self) -> int:
        return 2


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def _values(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_the_same_batches_again(loader_class: Any, tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    loader = loader_class(list(range(10)), 4, shuffle=True, generator=generator, collate_fn=tenfold)
    subject = Subject(loader, str(tmp_path))
    assert [len(keys) for keys in subject.keys] == [4, 4, 2]
    drawn = [[10 * key for key in keys] for keys in subject.keys]
    state = generator.get_state()
    assert _values(subject.like()) == _values(subject.like("warm")) == drawn
    assert _values(subject.like(batches=subject.keys[1:])) == drawn[1:]
    assert generator.get_state().equal(state)  # loaders like it draw nothing of the script's own
    assert (subject.samples, subject.length, subject.batch_size, subject.prefetch) == (10, 3, 4, 2)
    assert subject.kind == ("torch" if loader_class is DataLoader else "minato_gpu")


def test_more_workers_than_cores_are_no_news(loader_class: Any, tmp_path: Any) -> None:
    subject = Subject(loader_class(list(range(8)), 4), str(tmp_path))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        iter(subject.like(workers=16))
    assert not [each for each in told if each.category is not DeprecationWarning]  # Python 3.12 gives one for a fork


def test_batches_of_the_users_own_keep_their_composition(loader_class: Any, tmp_path: Any) -> None:
    subject = Subject(loader_class(list(range(5)), batch_sampler=Pairs()), str(tmp_path))
    assert _values(subject.like()) == [[3, 4], [0, 1, 2]]
    assert subject.batch_size == 3


def test_samples_without_batches(loader_class: Any, tmp_path: Any) -> None:
    subject = Subject(loader_class([5, 6, 7], None), str(tmp_path))
    assert list(subject.like()) == [5, 6, 7] and subject.batch_size == 1


def test_a_stream(loader_class: Any, tmp_path: Any) -> None:
    subject = Subject(loader_class(Endless(), 3), str(tmp_path))
    assert subject.is_stream and subject.keys == [] and subject.length is None and subject.samples == 0
    assert _values(subject.like("warm")) == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_dropped_last_batch(loader_class: Any, tmp_path: Any) -> None:
    subject = Subject(loader_class(list(range(10)), 4, drop_last=True), str(tmp_path))
    assert subject.samples == 8 and len(_values(subject.like())) == 2


def test_arguments_are_kept_but_for_what_stays(tmp_path: Any) -> None:
    kind: Any = minato_gpu.DataLoader
    loader = kind(
        list(range(8)), 2, num_workers=2, in_order=False, max_lateness=3, on_error="skip", persistent_workers=True
    )
    subject = Subject(loader, str(tmp_path))
    like: Any = subject.like("warm")
    assert (like.num_workers, like.in_order, like.max_lateness, like.on_error) == (2, False, 3, "skip")
    assert not like.persistent_workers and isinstance(like.dataset, Watched)
    assert like.collate_fn is default_collate  # ours stacks samples by itself where it knows that they are only stacked
    assert subject.like(workers=1).num_workers == 1
    assert (subject.lateness(), subject.persists, subject.uses_threads) == (3, True, False)
    torch_class: Any = DataLoader
    torchs: Any = Subject(torch_class(list(range(8)), 2), str(tmp_path)).like("warm")
    assert torchs.collate_fn.args == (default_collate,) and torchs.collate_fn is not default_collate


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_which_workers_there_are(kind: str, tmp_path: Any) -> None:
    ours: Any = minato_gpu.DataLoader
    loader = ours([1, 2], 1, num_workers=1, worker_kind=kind)
    assert Subject(loader, str(tmp_path)).uses_threads == (kind == "thread")
