"""Every case of the table: what comes is what the oracle says, on this loader and, where it promises the same, on
PyTorch's."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from fsspec.asyn import get_loop

from tests.contracts.cases import VALUES, Case, promised_by_pytorch, table
from tests.contracts.lineage import with_files
from tests.contracts.oracle import Drawn, differences, draws, due_draws
from tests.contracts.run import run
from tests.support.leaks import assert_no_leaks, take_snapshot

_PYTORCH = torch.utils.data.DataLoader


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """As for all contracts, and no descriptor of memory, of a process, a pipe or a socket is left open: but the files
    that libraries open when they are first used, and what a fork server is reached by."""
    case = getattr(request.node, "callspec", None) and request.node.callspec.params["case"]
    if case is not None and case.data == "urls":
        get_loop()  # a thread of fsspec's, which stays
    before = take_snapshot()
    before.descriptors["file"] = sys.maxsize
    yield
    assert_no_leaks(before, descriptors=case is None or case.context == "fork")


@pytest.mark.parametrize("case", table(), ids=str)
def test_this_loader(case: Case, tmp_path: Path) -> None:
    _check(case, differences(case, run(case, with_files(tmp_path)), due_draws(case, _drawn)))


@pytest.mark.parametrize("loader_class", [_PYTORCH], ids=["PyTorch's"])
@pytest.mark.parametrize("case", table(4_000, promised_by_pytorch), ids=str)
def test_the_same_of_pytorch(case: Case, loader_class: Any, tmp_path: Path) -> None:
    """The oracle is not this loader's own."""
    _check(case, differences(case, run(case, with_files(tmp_path), loader_class)))


@pytest.mark.on_request  # two seconds, of a walk that changes only with the table
def test_nearly_every_pair_of_values_occurs() -> None:
    """A walk four times as long finds few more. Each value occurs, and each case can be pasted from its name."""
    tried, longer = _pairs(table()), _pairs(table(4 * 20_000))
    assert len(tried & longer) > 0.97 * len(longer)
    assert {value for pair in tried for value in pair} >= {(name, each) for name in VALUES for each in VALUES[name]}
    assert all(eval(str(case)) == case for case in table())


def _pairs(cases: Sequence[Case]) -> set[Any]:
    return {pair for case in cases for pair in combinations(vars(case).items(), 2)}


@functools.cache
def _drawn(case: Case, loader_class: Any) -> Drawn:
    """What samples draw in the case that others are compared with."""
    with tempfile.TemporaryDirectory() as folder:
        return draws(case, run(case, with_files(Path(folder)), loader_class))


def _check(case: Case, found: list[str]) -> None:
    assert not found, f"{case}\n" + "\n".join(found)
