"""Checks of a recorded delivery against the sampler's order. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any


def differences(expected: Iterable[Hashable], delivered: Iterable[Hashable]) -> dict[str, list[Any]]:
    """What was delivered too few ("missing") or too many times ("extra"); both lists empty when exactly once."""
    wanted, got = Counter(expected), Counter(delivered)
    return {
        "missing": sorted((wanted - got).elements(), key=repr),
        "extra": sorted((got - wanted).elements(), key=repr),
    }


NOTHING: dict[str, list[Any]] = {"missing": [], "extra": []}


def lateness(order: Sequence[Hashable], batches: Sequence[Sequence[Hashable]], batch_size: int) -> list[int]:
    """How many batches after its place each sample came (negative: before), in the order of delivery.

    ``order``: what the sampler yielded, each value once. The place of position p is batch p // ``batch_size``.
    """
    place = {key: position // batch_size for position, key in enumerate(order)}
    return [number - place[key] for number, batch in enumerate(batches) for key in batch]
