"""What the device lane has issued to the device, until that is through with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minato_gpu.lanes.base import Item, Resident
from minato_gpu.memory.accelerator import Event
from minato_gpu.memory.layout import Views
from minato_gpu.memory.staging import Download
from minato_gpu.samples import Value

Container = Value
"""A sample's fields by name, or an array by row: where a value goes on the host."""


class Issued(NamedTuple):
    """The references of samples that were issued together.

    ``placed``: views, row and reference of those that stay on the device; ``beyond``: which has no room for them.
    ``home``: what goes to the host, to be set at the containers and keys in ``targets``; ``sample``: the one among them
    whose layout the engine wants to know.
    ``begin`` and ``end``: the device's events around all of that, the first one only where the device keeps time.
    """

    items: list[Item]
    placed: Sequence[tuple[Views, int, Resident]] = ()
    beyond: bool = False
    home: Download | None = None
    targets: Sequence[tuple[Container, str | int]] = ()
    sample: dict[str, Value] | None = None
    begin: Event | None = None
    end: Event | None = None

    @property
    def through(self) -> bool:
        """Whether ``settle`` would wait for nothing. An event that cannot be asked is for that to report."""
        try:
            return self.end is None or self.end.query()
        except Exception:
            return True
