"""What the assembly keeps of a place of the sampler's order, and of a batch on its way to the consumer."""

from __future__ import annotations

from typing import Any

from minato_gpu.lanes.base import Failure
from minato_gpu.scheduling.messages import Span


class Record:
    """One place of the order: its tickets, and its slab with the samples that are not plain rows of it."""

    __slots__ = ("epoch", "first", "items", "keys", "left", "occurrences", "positions", "rows", "slab", "sources")

    def __init__(
        self, epoch: int, first: int, positions: range | list[int], keys: list[Any], occurrences: list[int] | None
    ) -> None:
        self.epoch = epoch
        self.first = first
        self.positions = positions
        self.keys = keys
        self.occurrences = occurrences
        self.slab = -1
        self.rows = len(keys)
        self.left = len(keys)  # samples that no batch has taken yet
        self.items: dict[int, Any] = {}  # serial -> reference, for all that is not a plain row
        self.sources: dict[int, Any] = {}  # serial -> what the host read left


class Batch:
    """A composed batch: what it is made of until it is ready, then the way to its value."""

    __slots__ = ("failed", "failure", "item", "nbytes", "objects", "owner", "ready", "size", "spans")

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self.spans = spans
        self.size = sum(hi - lo for lo, hi in spans)
        self.nbytes = 0
        self.failed = 0
        self.ready = False
        self.failure: Failure | None = None
        self.owner: Any = None
        self.objects: list[list[Any]] = []
        self.item: Any = None
