"""A process that a program forks has workers of its own, and leaves those of its parent alone."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from tests.contracts.datasets import Made, Sourced
from tests.contracts.modes import BOUNDED_8, IN_ORDER, IN_ORDER_THREADS, Mode
from tests.support.concurrency import said_by_a_child

SAMPLES = 40

pytestmark = pytest.mark.usefixtures("no_leaks")


def _keys(batches: Any) -> list[int]:
    return sorted(int(key) for batch in batches for key in batch)


WHOLE = list(range(SAMPLES))


KINDS: dict[str, dict[str, Any]] = {
    "persistent": {"persistent_workers": True},
    "epochs": {"epochs": 5},
    "read ahead": {"persistent_workers": True, "cache": "1MB"},
    "replaced": {"persistent_workers": True, "on_worker_death": "replace"},
    "left at the end": {},
}


@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8, IN_ORDER_THREADS], ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("between", [False, True], ids=["in an epoch", "between epochs"])
def test_a_child_iterates_the_loader(mode: Mode, kind: str, between: bool) -> None:
    data = Sourced(SAMPLES, torch.tensor) if kind == "read ahead" else Made(SAMPLES, torch.tensor)
    loader = mode.loader(data, 4, num_workers=2, **KINDS[kind])
    iterator = iter(loader)
    head = [next(iterator)]
    if between:
        head += iterator
    assert said_by_a_child(lambda: [_keys(loader), _keys(loader)]) == [WHOLE] * 2
    assert _keys([*head, *iterator]) == WHOLE
    assert _keys(loader) == WHOLE


@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8, IN_ORDER_THREADS], ids=lambda mode: mode.name)
def test_an_iterator_is_its_own_processs(mode: Mode) -> None:
    """Two processes that read the same answers would both wait for what the other has got."""
    loader = mode.loader(Made(SAMPLES, torch.tensor), 4, num_workers=2)
    iterator = iter(loader)
    head = [next(iterator)]
    error = said_by_a_child(lambda: next(iterator))
    assert isinstance(error, RuntimeError)
    assert re.fullmatch(rf"this iterator, and its workers, are those of process {os.getpid()}, from .*", str(error))
    assert said_by_a_child(lambda: [loader.stats()["samples_delivered"], loader.state_dict()["epoch"]]) == [4, 0]
    assert _keys([*head, *iterator]) == WHOLE
