"""The loader's own arguments: what they resolve to, and clear errors where they contradict each other."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import sys
from fractions import Fraction
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset
from torch.utils.data import DataLoader as TorchDataLoader

import minato_gpu
import minato_gpu.device.accelerator
from minato_gpu import DataLoader, Pipeline, Stage
from minato_gpu.memory.limits import memory_limit
from minato_gpu.options import cache as cache_options
from minato_gpu.options.cache import CacheOptions
from minato_gpu.options.options import Options
from minato_gpu.pipeline.pipeline import Field, TorchFunction
from minato_gpu.sources.disk import LEAST_BUDGET as LEAST
from tests.contracts.datasets import Sourced
from tests.support.numbers import Stream
from tests.support.torchvision_operators import import_torchvision

X = Field(np.float32, (2,))


def _same(fields: Any, params: Any) -> Any:
    return {"x": fields["x"]}


def _pipeline(device: bool) -> Pipeline:
    stage = Stage("same", reads=("x",), writes={"x": X}, cpu=_same, device=TorchFunction(_same) if device else None)
    return Pipeline((stage,), outputs=("x",), name="tests")


WITH_DEVICE, CPU_ONLY = _pipeline(True), _pipeline(False)


def options(dataset: Any = range(10), **arguments: Any) -> Options:
    """What the arguments of a loader resolve to."""
    return DataLoader(dataset, **arguments)._session.options


def test_worker_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads by request, and by themselves where threads run in parallel."""
    assert options(worker_kind="thread", num_workers=1).threads
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert not options(num_workers=1).threads
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False)
    assert options(num_workers=1).threads
    assert not options(num_workers=1, worker_kind="process").threads
    assert not options(num_workers=1, multiprocessing_context="fork").threads


@pytest.mark.parametrize("limit", [np.int64(3), np.float32(0.5), Fraction(1, 2)], ids=repr)
def test_seconds_may_be_any_number(limit: Any) -> None:
    assert options(num_workers=1, hang_timeout=limit).lateness == 0
    with pytest.raises(ValueError, match="hang_timeout must be a positive number of seconds"):
        options(num_workers=1, hang_timeout=-limit)


_WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"on_error": "ignore"}, ValueError, "on_error must be 'raise', 'skip', 'retry' or a function"),
    ({"max_failures": 3}, ValueError, "leaves nothing out"),
    ({"on_error": "skip", "max_failures": -1}, ValueError, "must be a count"),
    ({"on_error": "skip", "max_failures": 1.5}, ValueError, "or a share from"),
    ({"on_error": "skip", "max_failures": "3"}, TypeError, "max_failures must be"),
    ({"pipeline": print}, TypeError, "pipeline must be a minato_gpu.Pipeline"),
    ({"host_memory_budget": 0}, ValueError, "host_memory_budget must be at least 1, got 0"),
    ({"host_memory_budget": 1e9}, TypeError, "host_memory_budget must be a whole number"),
    ({"max_workers": 1, "num_workers": 2}, ValueError, "max_workers must be at least 2, got 1"),
    ({"max_workers": 2}, ValueError, "it needs num_workers > 0"),
    ({"max_workers": "node", "num_workers": 2}, TypeError, "max_workers must be a whole number"),
    ({"max_workers": "host", "num_workers": 2, "worker_kind": "thread"}, ValueError, "it needs worker_kind='process'"),
    ({"share": "one"}, ValueError, "share: it is the process that reads ahead for workers; it needs num_workers > 0"),
    ({"share": "a/b", "num_workers": 1}, ValueError, "share must be a name without '/', of 1 to 64 bytes.*got 'a/b'"),
    ({"share": 3, "num_workers": 1}, TypeError, "share must be a name, True or None, got 3"),
    ({"share": True, "num_workers": 1}, ValueError, "which torchrun names by TORCHELASTIC_RUN_ID; it is not set"),
    ({"share": "one", "num_workers": 1}, ValueError, r"nothing to share; give it a method source\(key\)"),
    ({"share_budget": 9, "num_workers": 1}, ValueError, "share_budget is for samples that loaders share; pass share"),
    ({"share": "a", "share_budget": "x", "num_workers": 1}, ValueError, "share_budget='x' is no number of bytes"),
    ({"share": "a", "share_budget": 0, "num_workers": 1}, ValueError, "share_budget must be at least 1 byte.*leave it"),
    ({"share": "a", "share_budget": 1 << 60, "num_workers": 1}, ValueError, "is more than the .* bytes of .*pass less"),
    ({"prefetch_factor": 0, "num_workers": 1}, ValueError, "prefetch_factor must be at least 1, got 0"),
    ({"generator": 42}, TypeError, r"generator must be a torch.Generator, .*manual_seed\(42\), or None, got 42"),
    ({"epochs": True}, TypeError, "epochs must be a whole number"),
    ({"snapshot_every_n_steps": -1}, ValueError, "snapshot_every_n_steps must be at least 0, got -1; every step can"),
    ({"max_lateness": 2}, ValueError, "max_lateness=2 contradicts in_order=True.*in_order=False"),
    ({"max_lateness": -1, "in_order": False}, ValueError, "must not be negative"),
    ({"max_lateness": np.float64(2), "in_order": False}, TypeError, "whole number of batches or None, got np.float64"),
    ({"hang_timeout": np.True_, "num_workers": 1}, TypeError, "hang_timeout must be a number of seconds or None"),
    ({"worker_kind": "fiber"}, ValueError, "worker_kind must be one of 'auto', 'process', 'thread', got 'fiber'"),
    (
        {"worker_kind": "thread", "num_workers": 1, "multiprocessing_context": multiprocessing.get_context("fork")},
        ValueError,
        "leave out multiprocessing_context",
    ),
    ({"device": []}, ValueError, "device must name at least one"),
    ({"device": "gpu"}, ValueError, "device='gpu' is no device that.*use 'cpu' or 'cuda:0'"),
    ({"device": "meta"}, ValueError, "device='meta': batches live on 'cpu' or on 'cuda'"),
    ({"device": ["cpu", "cpu"]}, ValueError, "several devices must all be CUDA devices"),
    ({"lanes": "cpu"}, TypeError, "lanes must be a sequence"),
    ({"lanes": ["gpu"]}, ValueError, "lanes must name at least one of.*'gpu'"),
    ({"lanes": ["device"], "num_workers": 1}, ValueError, "'device' needs a pipeline"),
    ({"lanes": ["device"], "pipeline": CPU_ONLY, "num_workers": 1}, ValueError, "without a device implementation"),
    ({"lanes": ["device"], "pipeline": WITH_DEVICE}, ValueError, "needs num_workers > 0"),
    ({"pipeline": WITH_DEVICE, "dataset": Stream()}, ValueError, "map-style data set"),
    ({"dataset": Stream(), "num_workers": 2, "worker_kind": "thread"}, ValueError, "worker_kind"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), _WRONG, ids=[text for _, _, text in _WRONG])
def test_contradictions_are_refused_at_construction(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        options(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="device='cuda': this PyTorch sees no CUDA device"):
        options(device="cuda")


# --- cache and cache_dir ----------------------------------------------------------------------------------------------


class _DeclaringStream(Stream):
    """Declares what nobody asks for."""

    source = Sourced.source


def made(cache: Any = None, cache_dir: Any = None, dataset: Any = None, **more: Any) -> CacheOptions:
    data: Any = Sourced(10, int) if dataset is None else dataset
    return options(data, **{"num_workers": 1, "cache": cache, "cache_dir": cache_dir, **more}).cache


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (np.int64(5000), 5000),
        ("7", 7),
        ("32kb", 32_000),
        ("32 KiB", 32 << 10),
        (" 1.5 MB ", 1_500_000),
        ("1.5MiB", 3 << 19),
        (".25G", 250_000_000),
        ("0.001tib", (1 << 40) // 1000),
    ],
)
def test_sizes(given: Any, nbytes: int) -> None:
    assert made(given) == made({"memory": given}) == CacheOptions(memory_bytes=nbytes)
    assert made() == CacheOptions() and not made()


_NO_SIZE: list[tuple[Any, type[Exception], str]] = [
    *((text, ValueError, "is no number of bytes") for text in ("", "many", "1.2.3GB", "1e9", "-1GB", "32iB")),
    *((size, TypeError, "is no number of bytes") for size in (1.5, True, b"32GB", {"memory": None})),
    *((size, ValueError, "must be at least 1 byte") for size in (0, -1, "0.1", {"memory": 0})),
    *((cache, ValueError, "must name 'memory', 'disk' or both") for cache in ({}, {"memory": 1, "gpu": 1}, {1: 1})),
]


@pytest.mark.parametrize(("size", "error", "words"), _NO_SIZE)
def test_what_is_no_size(size: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        made(size)


def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache"
    assert made(LEAST, path) == made({"disk": LEAST}, str(path)) == CacheOptions(0, LEAST, str(path))
    assert made({"memory": 10, "disk": LEAST}, path) == CacheOptions(10, LEAST, str(path))
    assert path.is_dir(), "it is made at construction, where what is wrong with it can still be said"
    monkeypatch.chdir(tmp_path)
    assert made(LEAST, "cache").directory == str(path), "wherever the program goes"


@pytest.mark.parametrize(
    ("cache", "directory", "error", "words"),
    [
        (None, "d", ValueError, "say by cache how many bytes"),
        ({"memory": 1}, "d", ValueError, "go together"),
        ({"disk": "1GB"}, None, ValueError, "go together"),
        ({"memory": 1, "disk": "1GB"}, None, ValueError, "go together"),
        (LEAST - 1, "d", ValueError, f"needs at least {LEAST} bytes"),
        ("1GB", "", ValueError, "cache_dir is empty"),
        ("1GB", 3, TypeError, "must be a path"),
        ("1GB", b"d", TypeError, "must be a path"),
    ],
)
def test_directories_that_will_not_do(
    cache: Any, directory: Any, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        made(cache, directory)
    assert list(tmp_path.iterdir()) == []


def test_a_budget_beyond_the_memory_there_is() -> None:
    data: Any = [1]
    limit, _ = memory_limit()
    assert limit > 1 << 28
    DataLoader(data, num_workers=1, host_memory_budget=limit)
    with pytest.raises(ValueError, match=r"host_memory_budget=.* is more than the .* bytes of this"):
        DataLoader(data, num_workers=1, host_memory_budget=limit + 1)


def test_more_than_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_options, "memory_limit", lambda: (1000, "this job's memory limit (memory.max)"))
    assert made(1000)
    with pytest.raises(ValueError, match="is more than the 1000 bytes of this job's memory limit"):
        made(1001)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_workers": 0}, "needs num_workers > 0"),
        ({"dataset": list(range(10))}, r"give it a method source\(key\)"),
        ({"dataset": ConcatDataset([Sourced(10, int), list(range(10))])}, r"give it a method source\(key\)"),  # type: ignore[list-item]
        ({"dataset": _DeclaringStream()}, "an iterable data set reads for itself"),
    ],
)
def test_loaders_that_have_nothing_to_keep(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(100, **more)


def test_a_name_to_share_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = Sourced(10, int)
    assert options(dataset=data, num_workers=1, share=False).share == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert options(dataset=data, num_workers=1, share=True).share == "job-7"
    assert options(dataset=_NUMBERS, num_workers=1, share="one", share_budget="1MB").share_bytes == 10**6
    with pytest.raises(ValueError, match="a directory is shared by all whose cache_dir it is: leave out share"):
        options(dataset=data, num_workers=1, share="one", cache="10MB", cache_dir=tmp_path)


_NUMBERS: Any = range(10)
_OWN = {*signature(DataLoader).parameters} - {*signature(TorchDataLoader).parameters, "pipeline"}


@pytest.mark.parametrize("name", sorted(_OWN | {"batch_size", "in_order"}))
def test_arguments_are_not_set_later(name: str) -> None:
    """PyTorch says so of its own. A pipeline may be replaced."""
    loader = DataLoader(_NUMBERS)
    before = getattr(loader, name)
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader is initialized"):
        setattr(loader, name, 3)
    assert getattr(loader, name) == before
    assert getattr(copy.copy(loader), name) == before


def test_a_context_is_not_set_where_no_worker_would_start_by_it() -> None:
    threads: Any = DataLoader(_NUMBERS, num_workers=1, worker_kind="thread")
    stay: Any = DataLoader(_NUMBERS, num_workers=1, persistent_workers=True)
    stay.multiprocessing_context = "fork"
    batches = iter(stay)
    for loader in (threads, stay):
        with pytest.raises(ValueError, match=r"multiprocessing_context is of no use to this loader.*pass it to a new"):
            loader.multiprocessing_context = "spawn"
    assert len(list(batches)) == 10


@pytest.mark.parametrize("name", minato_gpu.__all__)
def test_the_public_face_is_shown_and_its_parameters_are_documented(name: str) -> None:
    """As editors read it: Google's style."""
    assert name in dir(minato_gpu)
    if name == "from_torchvision":
        import_torchvision()
    of = getattr(minato_gpu, name)
    methods = [each for each in (DataLoader.state_dict, DataLoader.load_state_dict) if of is DataLoader]
    for each in (of, *methods):
        known = {*signature(TorchDataLoader).parameters} - {"prefetch_factor"} if of is DataLoader else set()
        bare = isinstance(of, type) and (issubclass(of, Exception) or getattr(of, "_is_protocol", False))
        arguments = [] if bare else [*signature(each).parameters]
        found = (inspect.getdoc(each) or "").partition("Args:\n")[2]
        missing = [one for one in arguments if one not in known | {"self"} and f"    {one}: " not in found]
        assert not missing, f"{each.__name__}: {missing}"
