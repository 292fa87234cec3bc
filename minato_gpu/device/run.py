"""A task that the device lane is at: what has been issued of it, what is known of its samples, and its report."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import NamedTuple

from minato_gpu.device.output import Issued
from minato_gpu.lanes.base import Handed, Item, Piece, Report, Task


class Part(NamedTuple):
    """Samples of a task that came at one split point and were issued together.

    ``host_s``: seconds of the host's cores that issuing took, no more than passed meanwhile; ``ran``: those of the
    samples that could be read; ``repeated``: how many of them the CPU has prepared already, in the device's place;
    ``short``: because there was no memory.
    """

    split: int
    numbers: list[int]
    issued: Issued
    host_s: float
    ran: list[int]
    repeated: int
    short: bool


class DeviceRun:
    """``parts``: those that are not settled. ``items`` and ``times``: reference and seconds of each sample, in the
    order of ``tickets`` (of one that could not be read: 0.0, which nobody is to learn from).

    ``given``: the numbers of those that the executor has last been given. ``usual``: nothing was built for them;
    ``repeated``: how many ran a second time, on the CPU. ``device_s``: seconds that the device was at them, None where
    it does not say.
    """

    def __init__(self, task: Task, first: int) -> None:
        """``first``: the split point of samples that were not handed over."""
        self.task = task
        self.tickets = [(piece, at) for piece in task.pieces for at in range(len(piece.keys))]
        self.splits = [_split(piece, at, first) for piece, at in self.tickets]
        self.parts: deque[Part] = deque()
        self.given: list[int] = []
        self.items: list[Item] = [None] * len(self.tickets)
        self.times = [0.0] * len(self.tickets)
        self.begin = perf_counter()
        self.usual = True
        self.repeated = 0
        self.device_s: float | None = 0.0

    def by_split(self) -> dict[int, list[int]]:
        """The samples' numbers by the split point at which they come."""
        found: dict[int, list[int]] = {}
        for number, split in enumerate(self.splits):
            found.setdefault(split, []).append(number)
        return found

    @property
    def through(self) -> bool:
        """Whether reporting the task would wait for nothing."""
        return all(part.issued.through for part in self.parts)

    def settle(self, part: Part, items: list[Item], device_s: float | None) -> None:
        """The device is through with the part, of which these are the references."""
        self.device_s = None if device_s is None or self.device_s is None else self.device_s + device_s
        each = (part.host_s if device_s is None else device_s) / max(1, len(part.ran))
        for number, item in zip(part.numbers, items, strict=True):
            self.items[number] = item
        for number in part.ran:
            self.times[number] = each

    def report(self, begin: float, end: float, layout: bytes | None, *, tells_parts: bool) -> Report:
        """The task has been at work from ``begin`` to ``end``. ``tells_parts``: its pipeline can be cut."""
        usual = self.usual and not self.repeated
        pairs = zip(self.splits, self.times, strict=True)
        return Report(
            run=self.task.run,
            chunk=self.task.chunk,
            worker=0,
            first=0,
            done=len(self.tickets),
            seconds=end - begin if self.device_s is None else self.device_s,
            begin=begin,
            end=end,
            final=True,
            items=self.items if any(item is not None for item in self.items) else None,
            times=self.times if usual else None,
            parts=[(split, (each,)) for split, each in pairs] if usual and tells_parts else None,
            layout=layout,
            repeated=self.repeated,
        )


def _split(piece: Piece, at: int, first: int) -> int:
    """The split point at which the ticket comes."""
    source = None if piece.sources is None else piece.sources[at]
    return source.stage if isinstance(source, Handed) else first
