"""State of one task on the device lane: its issued parts, the results so far, and the report made from them."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import NamedTuple

from minato_gpu.device.output import Issued
from minato_gpu.lanes.base import Handed, Item, Piece, Report, Task


class Part(NamedTuple):
    """Samples of a task that share a split point and were issued together."""

    split: int
    numbers: list[int]  # numbers of the tickets in the task
    issued: Issued
    host_s: float  # seconds: CPU time of issuing, at most the wall time
    ran: list[int]  # those of ``numbers`` whose samples could be read
    repeated: int  # samples that the CPU has prepared in the device's place
    out_of_memory: bool  # the device had no memory for it


class DeviceRun:
    """One task in flight, for the lane's thread. Tickets are numbered through the task; lists are in that order."""

    def __init__(self, task: Task, first: int) -> None:
        """``first``: the split point of samples that were not handed over by a CPU worker."""
        self.task = task
        self.tickets = [(piece, at) for piece in task.pieces for at in range(len(piece.keys))]
        self.splits = [_split(piece, at, first) for piece, at in self.tickets]
        self.parts: deque[Part] = deque()  # issued and not finished
        self.submitted: list[int] = []  # numbers of the tickets that the executor was given last
        self.items: list[Item] = [None] * len(self.tickets)  # references
        self.times = [0.0] * len(self.tickets)  # seconds each; 0.0 for one that could not be read
        self.begin = perf_counter()
        self.typical = True  # nothing was built or waited for, so that the cost model may learn from ``times``
        self.repeated = 0  # samples that ran a second time, on the CPU
        self.device_s: float | None = 0.0  # device time in all; None where it is not measured

    def by_split(self) -> dict[int, list[int]]:
        """Returns the tickets' numbers grouped by the split point at which they enter."""
        found: dict[int, list[int]] = {}
        for number, split in enumerate(self.splits):
            found.setdefault(split, []).append(number)
        return found

    @property
    def finished(self) -> bool:
        """True when the device has finished all issued parts, so that reporting would not wait."""
        return all(part.issued.finished for part in self.parts)

    def settle(self, part: Part, items: list[Item], device_s: float | None) -> None:
        """Stores a finished part: the references ``items``, and its device time in seconds (None: not measured)."""
        self.device_s = None if device_s is None or self.device_s is None else self.device_s + device_s
        each = (part.host_s if device_s is None else device_s) / max(1, len(part.ran))
        for number, item in zip(part.numbers, items, strict=True):
            self.items[number] = item
        for number in part.ran:
            self.times[number] = each

    def report(self, begin: float, end: float, layout: bytes | None, *, tells_parts: bool) -> Report:
        """Returns the final report. ``begin`` and ``end`` are times of the monotonic clock; ``tells_parts``: whether
        the pipeline has split points, so that costs are reported by split point."""
        usual = self.typical and not self.repeated
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
    """Returns the split point at which ticket ``at`` of ``piece`` enters the device lane."""
    source = None if piece.sources is None else piece.sources[at]
    return source.stage if isinstance(source, Handed) else first
