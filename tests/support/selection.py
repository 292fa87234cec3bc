"""Which of the collected tests the gate runs, and which only ``--all`` (``make test-all``) does.

Of a test with parameters the gate runs cases in which all pairs of their values occur (``covering``). A mode counts as
two of them, whether batches may be overtaken and the kind of worker, and as neither where there are no workers; by how
much they may be overtaken only has to occur. Of the orders in which a fake device may do things, two of those that are
drawn from a seed are enough.

Parameters that a test lists together (``"a, b"``) count as one. Where two have many values and a case takes long, a
test may be marked ``each_value``: then each occurs, but not each pair.

PyTorch's own loader shows that a test states PyTorch's behaviour, which no change here can alter: its cases run with
``--all`` alone, and so do tests marked ``on_request``. Who names a test (``FILE::TEST``) gets all of its cases.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import pytest
import torch.utils.data

from tests.contracts.modes import Mode
from tests.support.covering import Case, pairwise

_SEED = "seed of the device's order"
_WORKERS = ("workers", "num_workers")
_LATENESS = "max_lateness"
_OF_WORKERS = ("bounded", _LATENESS, "worker_kind")


def chosen(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The tests that the gate runs."""
    groups: dict[Hashable, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("on_request") is None and not _is_control(item):
            name = getattr(item, "originalname", item.name)
            groups.setdefault((item.parent and item.parent.nodeid, name), []).append(item)
    return {item for group in groups.values() for item in _covering(group)}


def _covering(group: list[pytest.Item]) -> list[pytest.Item]:
    """Some of the cases of one test."""
    cases = [factors(item) for item in group]
    alone = {_SEED, _LATENESS}
    if group[0].get_closest_marker("each_value") is not None:
        alone.update(name for case in cases for name in case)
    return [group[at] for at in pairwise(cases, frozenset(alone))]


def factors(item: pytest.Item) -> Case:
    """What a case is made of."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return {}
    found: dict[str, Hashable] = {}
    together = {name: names for names in _given_together(item) for name in names}
    for name, value in callspec.params.items():
        if name in together:
            names = together[name]
            found[",".join(names)] = tuple(_plain(callspec.params[each]) for each in names)
        elif isinstance(value, Mode):
            found.update(value.factors)
        elif name == "order" and type(value) is int:
            found.update({name: "drawn", _SEED: value % 2})
        else:
            found[name] = _plain(value)
    if any(found.get(name) == 0 for name in _WORKERS):
        found = {name: value for name, value in found.items() if name not in _OF_WORKERS}
    return found


def _given_together(item: pytest.Item) -> Iterable[tuple[str, ...]]:
    """Parameters whose values were listed together: somebody has chosen the combinations, which count as one value."""
    apart = item.get_closest_marker("each_value") is not None
    for mark in () if apart else item.iter_markers("parametrize"):
        names = mark.args[0]
        names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
        if len(names) > 1:
            yield names


def _plain(value: Any) -> Hashable:
    """The value, or which object it is: all cases are given the same ones."""
    return value if isinstance(value, (str, int, float, type(None))) else id(value)


def _is_control(item: pytest.Item) -> bool:
    """Whether PyTorch's own loader is what is tested."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and any(_is_pytorch(value) for value in callspec.params.values())


def _is_pytorch(value: Any) -> bool:
    """``torchdata``: the other loader that the tests of its documentation run on."""
    pytorch = torch.utils.data.DataLoader
    if isinstance(value, Mode):
        return value.loader_class is pytorch
    return value is pytorch or (isinstance(value, str) and value == "torchdata")
