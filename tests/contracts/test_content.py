"""P2: the content of a sample depends on seed, epoch, index and occurrence alone. That it is the same in every mode is
in the table (``cases.py``)."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import pytest
import torch

from tests.contracts.datasets import Made, draw, rows
from tests.contracts.modes import BOUNDED_8, IN_ORDER, Mode
from tests.support import programs


def _epochs(mode: Mode, make: Callable[[Any], Any], workers: int, epochs: int = 2, **arguments: Any) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(17)
    loader = mode.loader(Made(40, make), 4, num_workers=workers, generator=generator, **arguments)
    return [sorted(rows(loader)) for _ in range(epochs)]


def _mixed(samples: list[Any]) -> tuple[list[Any], list[Any]]:
    return samples, draw(0)[1:]


def _draw_later(key: int) -> list[Any]:
    return draw(key) if key >= 40 else [key]  # when the first ones have been looked at for draws


@pytest.mark.parametrize("make", [draw, _draw_later, int], ids=["samples draw", "later samples draw", "samples do not"])
def test_what_a_collate_fn_draws_is_the_batchs_own(make: Callable[[Any], Any]) -> None:
    """Mixup draws there. In one chunk a worker joins batch after batch; costly samples are joined by any of them."""

    def run(workers: int, **arguments: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(17)
        loader = IN_ORDER.loader(
            Made(80, make), 4, num_workers=workers, generator=generator, collate_fn=_mixed, **arguments
        )
        return [batch for _ in range(2) for batch in loader]

    reference = run(1)
    assert len({str(drawn) for _, drawn in reference}) == 40, "each batch has its own, in each epoch"
    assert run(2) == run(3, prefetch_factor=1) == reference


def _every_thirteenth(index: int) -> list[Any]:
    return draw(index) if index % 13 == 5 else [index, *[0.0] * 6]


def _with_own_seeds(index: int) -> list[Any]:
    """Some samples set the generators: that must not reach the samples that come after them in the same worker."""
    if index % 5 == 0:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
    return draw(index)


@pytest.mark.parametrize("make", [_every_thirteenth, _with_own_seeds])
def test_what_other_samples_draw_does_not_matter(make: Callable[[Any], Any]) -> None:
    reference = _epochs(IN_ORDER, make, 1)
    assert _epochs(IN_ORDER, make, 3) == reference
    assert _epochs(BOUNDED_8, make, 2, sampler=list(reversed(range(40)))) == reference
    alone = _epochs(IN_ORDER, make, 1, sampler=[18])
    assert alone == [[row for row in epoch if row[0] == 18] for epoch in reference]


_SCRIPT = """
import torch
from minato_gpu import DataLoader
from tests.contracts.datasets import Made, draw, rows
keys = ["cat", "dog", ("a", 1), b"raw"]
data = Made(4, lambda key: [str(key), *draw(key)[1:]])
loader = DataLoader(data, 2, sampler=keys, num_workers=2, generator=torch.Generator().manual_seed(3))
print(hash("cat"))
print([row[1:] for row in rows(loader)])
"""


def test_keys_mean_the_same_in_another_interpreter() -> None:
    """Python salts the hash of a string in each interpreter; the content must not depend on it."""
    with redirect_stdout(io.StringIO()) as here:
        exec(_SCRIPT, {})
    there_hash, there = programs.run("tests.support.source", _SCRIPT).splitlines()
    here_hash, said = here.getvalue().splitlines()
    assert here_hash != there_hash
    assert said.startswith("[(") and said == there
