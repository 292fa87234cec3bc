"""Samples of which some raise, for the tests of what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BAD = (5, 6, 17, 30)
GOOD = [index for index in range(40) if index not in BAD]


def broken(index: int) -> Any:
    """Those of ``BAD`` are."""
    if index in BAD:
        raise ValueError(f"sample {index} is broken")
    return torch.tensor(index)


def rarely_broken(index: int) -> Any:
    """Two that are broken are never in one window of 16, so never in one batch either."""
    if index % 25 == 5:
        raise ValueError(f"sample {index} is broken")
    return torch.tensor(index)


COLLATE: dict[str, Callable[[Any], Any] | None] = {"stacked": None, "joined": list}


def numbers(batches: Any) -> list[int]:
    """What was delivered, in one list."""
    return [int(number) for batch in batches for number in batch]
