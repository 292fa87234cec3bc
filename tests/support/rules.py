"""Rules for every test: a time limit, GPU tests, no leaks. Loaded by conftest.py in each process that runs tests.

Of a test's cases those are run in which all pairs of values occur; ``--all`` runs all, see tests/support/selection.py.

``--require-gpu`` makes a GPU test that is skipped, for whatever reason, a failure: on a machine with a GPU nothing
may be left out silently.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    gc.disable()  # until all is imported and collected (_freeze): nearly nothing of that is garbage
    # torch imports the deprecated pynvml where that is installed; not ours to mend.
    warnings.simplefilter("ignore")
    import torch
    import torch.utils.data

import minato_gpu
from minato_gpu.device.lane import DeviceLane
from minato_gpu.lab.analysis import script
from minato_gpu.util.messages import say_once
from tests.conftest import LEFT_OUT
from tests.lab.analysis.scripts import Forked
from tests.support import selection
from tests.support.leaks import assert_no_leaks, take_snapshot
from tests.support.waiting import wait_until

_TIME_LIMIT_S = 180  # a hang: what takes 14 s alone takes more than 60 beside a load of six


class _Late:
    """A module that is imported where it is first used, not where test files are collected: what is in memory is copied
    with each fork of a worker, and let go with each (measured: contract tests take 175 s of CPU in processes of 243 MB,
    and 191 s in those of 315 MB)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


with contextlib.suppress(ImportError):
    import scipy

    for _name in ("stats", "signal", "sparse", "ndimage"):
        setattr(scipy, _name, _Late(f"scipy.{_name}"))

multiprocessing.set_forkserver_preload(["torch"])  # else each worker from a fork server would import it
_FAILED = pytest.StashKey[bool]()
_IMPORTED = pytest.StashKey[int]()


@pytest.fixture
def open_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device lanes are open before there is anything to send: where cores are busy they could open after the last
    sample."""
    begin = DeviceLane.__init__

    def begin_and_wait(self: DeviceLane, *args: Any, **more: Any) -> None:
        begin(self, *args, **more)
        assert wait_until(lambda: self._messages)  # that it has opened

    monkeypatch.setattr(DeviceLane, "__init__", begin_and_wait)


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of class folders with example photographs, which no test changes."""
    folder = tmp_path_factory.mktemp("photographs")
    importlib.import_module("pipelines.image_classification").example_data(folder)
    return folder


# PyTorch's own loader first: it shows that a test states PyTorch's behaviour.
@pytest.fixture(params=[torch.utils.data.DataLoader, minato_gpu.DataLoader], ids=["torch", "minato"])
def loader_class(request: pytest.FixtureRequest) -> Any:
    """The class under test: torch.utils.data.DataLoader, then minato_gpu.DataLoader."""
    return request.param


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts under analysis run in processes that were forked, not in interpreters of their own."""
    monkeypatch.setattr(script, "started", Forked)


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that leaves a process, a thread or shared memory behind.

    Descriptors are left to the tests that warm up first (``tests.support.leaks.check_scenario``): the first use of many
    libraries opens some for good. A test that failed is not checked: its traceback keeps its iterators alive.
    """
    before = take_snapshot(descriptors=False)
    yield
    if not request.node.stash.get(_FAILED, False):
        assert_no_leaks(before, descriptors=False)


@pytest.hookimpl(trylast=True)  # what -k leaves out is not there any more
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("all") and not any("::" in argument for argument in config.args):
        _leave_out(config, items)
    items[:] = _light_first(items)
    if config.getoption("timeout") is not None:
        return
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIME_LIMIT_S))


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the gate does not run."""
    chosen = selection.chosen(items)
    left_out = [item for item in items if item not in chosen]
    items[:] = [item for item in items if item in chosen]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)


_IMPORT_MUCH = {"benchmarks", "pipelines", "tools", "demo"}


def _light_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The few that are marked as long, by a time limit, come first: one of them at the end would keep one process while
    others are idle. Then those that fork most and import least: a fork takes the longer the more libraries are loaded,
    up to three times as long here. Each process of xdist begins with a share of the list of its own, so each is so
    ordered.
    """
    groups: dict[str, list[pytest.Item]] = {"long": [], "torch_semantics": [], "contracts": [], "": [], "imports": []}
    for item in items:
        folder, limit = item.path.parent.name, item.get_closest_marker("timeout")
        group = folder if folder in groups else "imports" if folder in _IMPORT_MUCH else ""
        groups["long" if limit is not None and limit.args[0] >= _TIME_LIMIT_S else group].append(item)
    shares = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return [
        item
        for share in range(shares)
        for group in groups.values()
        for item in group[len(group) * share // shares : len(group) * (share + 1) // shares]
    ]


_SOME = 50  # modules


def _freeze(config: pytest.Config) -> None:
    """What was imported is not looked through for garbage again: that takes up to 0.3 s each time, many times."""
    gc.collect()
    gc.freeze()
    gc.enable()
    config.stash[_IMPORTED] = len(sys.modules)


def pytest_collection_finish(session: pytest.Session) -> None:
    _freeze(session.config)


@pytest.hookimpl(tryfirst=True)  # while no fixture of the test is there
def pytest_runtest_setup(item: pytest.Item) -> None:
    if len(sys.modules) > item.config.stash[_IMPORTED] + _SOME:
        _freeze(item.config)
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    say_once.cache_clear()  # whichever test came before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    if report.skipped and item.get_closest_marker("gpu") is not None and item.config.getoption("--require-gpu"):
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: a GPU test was skipped: {report.longrepr}"
    return report
