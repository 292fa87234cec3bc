"""Samples of a lane are those that it has prepared: with workers and without, the same of the same data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minato_gpu import BadSample, DataLoader
from tests.contracts.datasets import Made

BAD = 3, 9, 16


def _broken(index: int) -> int:
    if index in BAD:
        raise ValueError(f"sample {index} is broken")
    return index


def _nine(bad: BadSample) -> str:
    return "raise" if bad.index == 9 else "skip"


def _no_eight(samples: Sequence[int]) -> Sequence[int]:
    if 8 in samples:
        raise ValueError("eight")
    return samples


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(
    ("make", "more", "prepared"),
    [
        (_broken, {"on_error": "skip"}, 17),
        (_broken, {"on_error": _nine}, 17),
        (int, {"collate_fn": _no_eight}, 20),
        (int, {}, 20),
    ],
    ids=["left out", "one raised", "not joined", "none failed"],
)
def test_a_lane_counts_what_it_has_prepared(make: Any, more: dict[str, Any], prepared: int, workers: int) -> None:
    loader: Any = DataLoader(Made(20, make), 4, num_workers=workers, **more)
    batches = iter(loader)
    for _ in range(6):
        try:
            if next(batches, None) is None:
                break
        except ValueError:
            continue
    stats = loader.stats()
    failed, skipped = stats["samples_failed"], stats["samples_skipped"]
    assert stats["samples_delivered"] + failed + skipped == 20
    assert stats["lanes"]["cpu"]["samples"] == prepared
