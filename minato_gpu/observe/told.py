"""What a loader tells of itself to whoever looks from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from minato_gpu.samples import JSON

Key = tuple[str, str]
"""A counter: its name, and which of several it is (a lane, a cause, a tier; "" where there is one)."""

Counts = Mapping[Key, float]

PROTOCOL = "minato_gpu.stats.1"
"""The first thing that is said on a socket: what follows."""


class Told(NamedTuple):
    """``stats`` of epoch number ``epoch``; ``ended``: what was counted before it, where somebody wants that."""

    epoch: int
    stats: dict[str, JSON]
    ended: Counts


class Teller(Protocol):
    """A loader, as it is watched: ``kind``, a word for what it loads. Asked by any thread."""

    kind: str

    def told(self) -> Told | None:
        """How it stands; None before its first epoch."""
