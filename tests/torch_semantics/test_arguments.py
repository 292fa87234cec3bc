"""The constructor: its signature, its argument errors, and what stays readable and frozen afterwards."""

from __future__ import annotations

import inspect
import multiprocessing
import re
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate, default_convert

from tests.torch_semantics.datasets import Numbers, Stream, as_lists, keep

_DATA = Numbers(7)
_STREAM = Stream(7)
_SEQUENTIAL = SequentialSampler(_DATA)
_BATCHES = BatchSampler(_SEQUENTIAL, 2, False)

_EXCLUSIVE = "batch_sampler option is mutually exclusive"
_OF_STREAMS = "DataLoader with IterableDataset: expected unspecified {0} option, but got {0}="
_CONTEXT = "multiprocessing_context option"
_BAD_ARGUMENTS: list[tuple[Any, dict[str, Any], str]] = [
    (_DATA, {"num_workers": -1}, "num_workers option should be non-negative"),
    (_DATA, {"timeout": -1}, "timeout option should be non-negative"),
    (_DATA, {"prefetch_factor": 2}, "prefetch_factor option could only be specified in multiprocessing"),
    (_DATA, {"prefetch_factor": -1, "num_workers": 1}, "prefetch_factor option should be non-negative"),
    (_DATA, {"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
    (_DATA, {"shuffle": True, "sampler": _SEQUENTIAL}, "sampler option is mutually exclusive with shuffle"),
    (_DATA, {"batch_sampler": _BATCHES, "batch_size": 2}, _EXCLUSIVE),
    (_DATA, {"batch_sampler": _BATCHES, "batch_size": None}, _EXCLUSIVE),
    (_DATA, {"batch_sampler": _BATCHES, "shuffle": True}, _EXCLUSIVE),
    (_DATA, {"batch_sampler": _BATCHES, "drop_last": True}, _EXCLUSIVE),
    (_DATA, {"batch_sampler": _BATCHES, "sampler": _SEQUENTIAL}, _EXCLUSIVE),
    (_DATA, {"batch_size": None, "drop_last": True}, "batch_size=None option disables auto-batching"),
    (_DATA, {"batch_size": 0}, "batch_size should be a positive integer value, but got batch_size=0"),
    (_DATA, {"batch_size": -3}, "batch_size should be a positive integer value, but got batch_size=-3"),
    (_DATA, {"batch_size": 2.0}, "batch_size should be a positive integer value"),
    (_DATA, {"batch_size": True}, "batch_size should be a positive integer value"),
    (_DATA, {"drop_last": 1}, "drop_last should be a boolean value, but got drop_last=1"),
    (Numbers(0), {"shuffle": True}, "num_samples should be a positive integer value"),
    (_STREAM, {"shuffle": True}, _OF_STREAMS.format("shuffle") + "True"),
    (_STREAM, {"sampler": _SEQUENTIAL}, _OF_STREAMS.format("sampler")),
    (_STREAM, {"batch_sampler": _BATCHES}, _OF_STREAMS.format("batch_sampler")),
    (_DATA, {"multiprocessing_context": "fork"}, "multiprocessing_context can only be used with multi-process loading"),
    (_DATA, {"multiprocessing_context": "bad", "num_workers": 1}, f"{_CONTEXT} should specify a valid start method in"),
    (_DATA, {"multiprocessing_context": 3, "num_workers": 1}, f"{_CONTEXT} should be a valid context object or a str"),
]


@pytest.mark.parametrize(("data", "arguments", "start"), _BAD_ARGUMENTS)
def test_bad_arguments(loader_class: Any, data: Any, arguments: dict[str, Any], start: str) -> None:
    with pytest.raises((ValueError, TypeError), match="^" + re.escape(start)) as caught:
        loader_class(data, **arguments)
    assert type(caught.value) is (TypeError if "object" in start else ValueError)


def test_unknown_keyword(loader_class: Any) -> None:
    with pytest.raises(TypeError, match="batchsize"):
        loader_class(_DATA, batchsize=3)


def test_no_arguments(loader_class: Any) -> None:
    with pytest.raises(TypeError, match="dataset"):
        loader_class()


def test_shuffle_false_and_none_are_allowed_for_streams(loader_class: Any) -> None:
    for shuffle in (None, False):
        assert as_lists(loader_class(_STREAM, batch_size=4, shuffle=shuffle)) == [[0, 1, 2, 3], [4, 5, 6]]


def test_signature_starts_with_pytorchs(loader_class: Any) -> None:
    theirs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    ours = inspect.signature(loader_class.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(ours)[len(theirs) :])


def test_positional_arguments(loader_class: Any) -> None:
    loader = loader_class(_DATA, 3, False, None, None, 0, keep, False, True, 0, None, None, None)
    assert (loader.batch_size, loader.collate_fn, loader.drop_last) == (3, keep, True)
    assert [len(batch) for batch in loader] == [3, 3]


def test_attributes_with_defaults(loader_class: Any) -> None:
    loader = loader_class(_DATA)
    expected = {
        "dataset": _DATA,
        "batch_size": 1,
        "num_workers": 0,
        "pin_memory": False,
        "drop_last": False,
        "timeout": 0,
        "worker_init_fn": None,
        "multiprocessing_context": None,
        "generator": None,
        "prefetch_factor": None,
        "persistent_workers": False,
        "pin_memory_device": "",
        "in_order": True,
        "collate_fn": default_collate,
    }
    assert {name: getattr(loader, name) for name in expected} == expected
    assert isinstance(loader.sampler, SequentialSampler)
    assert isinstance(loader.batch_sampler, BatchSampler)


def test_attributes_as_given(loader_class: Any) -> None:
    generator = torch.Generator()
    given = {
        "batch_size": 3,
        "num_workers": 1,
        "collate_fn": keep,
        "drop_last": True,
        "timeout": 5,
        "worker_init_fn": keep,
        "generator": generator,
        "prefetch_factor": 4,
        "persistent_workers": True,
        "pin_memory_device": "cuda",
        "in_order": False,
    }
    loader = loader_class(_DATA, shuffle=True, multiprocessing_context="fork", **given)
    assert {name: getattr(loader, name) for name in given} == given
    assert isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is generator
    assert isinstance(loader.multiprocessing_context, multiprocessing.context.BaseContext)
    assert (loader.batch_sampler.sampler, loader.batch_sampler.batch_size) == (loader.sampler, 3)


def test_attributes_that_follow_from_others(loader_class: Any) -> None:
    assert loader_class(_DATA, num_workers=1).prefetch_factor == 2
    unbatched = loader_class(_DATA, batch_size=None)
    assert (unbatched.batch_size, unbatched.batch_sampler, unbatched.collate_fn) == (None, None, default_convert)
    own = loader_class(_DATA, batch_sampler=_BATCHES)
    assert (own.batch_size, own.drop_last, own.batch_sampler) == (None, False, _BATCHES)


_NEW_VALUES: dict[str, Any] = {
    "batch_size": 2,
    "batch_sampler": None,
    "sampler": None,
    "drop_last": True,
    "dataset": [],
    "persistent_workers": True,
}


@pytest.mark.parametrize("name", _NEW_VALUES)
def test_frozen_attributes(loader_class: Any, name: str) -> None:
    loader = loader_class(_DATA)
    with pytest.raises(ValueError, match=f"^{name} attribute should not be set after .*DataLoader is initialized"):
        setattr(loader, name, _NEW_VALUES[name])


def test_other_attributes_may_change_between_epochs(loader_class: Any) -> None:
    loader = loader_class(_DATA, batch_size=4)
    list(loader)
    loader.collate_fn = keep
    assert [type(batch) for batch in loader] == [list, list]
    loader.num_workers = 1
    loader.prefetch_factor = 2
    assert [len(batch) for batch in loader] == [4, 3]
    loader.num_workers = 0
    loader.anything = 3
    assert loader.anything == 3


def test_context_is_checked_when_it_is_set(loader_class: Any) -> None:
    loader = loader_class(_DATA, num_workers=1)
    loader.multiprocessing_context = "spawn"
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    with pytest.raises(ValueError, match="should specify a valid start method"):
        loader.multiprocessing_context = "bad"


def test_too_many_workers_warn_at_construction(loader_class: Any) -> None:
    with pytest.warns(UserWarning, match="^This DataLoader will create 4096 worker processes in total"):
        loader_class(_DATA, num_workers=4096)
