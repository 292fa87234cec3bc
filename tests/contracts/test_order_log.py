"""order_log: an out-of-order run is recorded, and a replay gives exactly the same batches."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.datasets import Made, draw, rows
from tests.contracts.modes import BOUNDED, BOUNDED_8, IN_ORDER, Mode

_FORK = multiprocessing.get_context("fork")


def _loader(mode: Mode, log: Path, make: Any, workers: int = 2, length: int = 60, **arguments: Any) -> Any:
    generator = torch.Generator().manual_seed(4)
    extra = {"sampler": [(7 + 13 * index) % length for index in range(length)], **arguments}
    return mode.loader(Made(length, make), 4, num_workers=workers, generator=generator, order_log=log, **extra)


class _Disordered:
    """Holds sample 7, the sampler's first, back until the consumer has seen as many batches as the lateness allows."""

    def __init__(self) -> None:
        self.gate = _FORK.Event()

    def __call__(self, index: int) -> Any:
        if index == 7:
            assert self.gate.wait(50), "the test never let it go"
        return draw(index)


def _recorded(mode: Mode, log: Path, epochs: int = 2) -> list[list[Any]]:
    make = _Disordered()
    loader = _loader(mode, log, make)
    batches = []
    for _ in range(epochs):
        make.gate.clear()
        iterator = iter(loader)
        batches += [next(iterator) for _ in range(mode.lateness)]
        make.gate.set()
        batches += list(iterator)
    return [rows([batch]) for batch in batches]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("mode", BOUNDED[:2], ids=lambda mode: mode.name)
def test_replay_gives_the_same_batches(mode: Mode, workers: int, tmp_path: Path) -> None:
    """Composition, order and content; two epochs, with any number of workers, where nothing is held back any more."""
    log = tmp_path / "order.log"
    recorded = _recorded(mode, log)
    text = log.read_bytes()
    loader = _loader(mode, log, draw, workers)
    replayed = [rows([batch]) for _ in range(2) for batch in loader]
    assert replayed == recorded
    assert log.read_bytes() == text


def test_the_recorded_run_was_out_of_order(tmp_path: Path) -> None:
    """Without this the test above would prove nothing."""
    recorded = _recorded(BOUNDED_8, tmp_path / "order.log", epochs=1)
    generator = torch.Generator().manual_seed(4)
    sampler = [(7 + 13 * index) % 60 for index in range(60)]
    in_order = IN_ORDER.loader(Made(60, draw), 4, sampler=sampler, num_workers=2, generator=generator)
    batches = [rows([batch]) for batch in in_order]
    assert recorded != batches
    assert sorted(row for batch in recorded for row in batch) == sorted(row for batch in batches for row in batch)
