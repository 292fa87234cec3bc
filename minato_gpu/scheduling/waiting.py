"""Tickets that wait for a lane, in the order in which they should start.

An entry is a run of neighbouring serials that are predicted to cost the same (cheap ones are handled by the
hundred) or one costly sample. Each entry waits on one *side*, the lane kind that it is meant for; both heaps of
a side delete lazily.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from minato_gpu.scheduling.messages import CPU

DEVICE = "device"
SIDES = (CPU, DEVICE)


class Entry:
    """A run of serials ``lo`` to ``hi`` with the predicted seconds of each on either kind of lane.

    A cost is None when unknown, and ``device`` is None when the sample cannot run there. ``inspect`` marks
    tickets whose costs must be read from their headers first.
    """

    __slots__ = ("cpu", "device", "hi", "inspect", "lo", "priority", "side", "slow", "taken")

    def __init__(self, lo: int, hi: int, cpu: float | None = None, device: float | None = None) -> None:
        self.lo = lo
        self.hi = hi
        self.cpu = cpu
        self.device = device
        self.inspect = False
        self.priority = float(lo)
        self.side = CPU
        self.slow = False
        self.taken = False

    @property
    def ratio(self) -> float:
        """How much dearer the CPU is than the device: the larger, the more the device lane gains."""
        if self.cpu is None or self.device is None:
            return 0.0
        return self.cpu / self.device if self.device > 0 else float("inf")

    def __lt__(self, other: Entry) -> bool:
        return False  # equal heap keys only meet when an entry was moved away and back


_Heap = list[tuple[float, int, Entry]]


class Waiting:
    """Entries by side, by start priority (slow ones apart) and by nearness to the routing threshold."""

    def __init__(self) -> None:
        self._fast: dict[str, _Heap] = {side: [] for side in SIDES}
        self._slow: dict[str, _Heap] = {side: [] for side in SIDES}
        self._near: dict[str, _Heap] = {side: [] for side in SIDES}
        self._entries: dict[int, Entry] = {}
        self._counts = dict.fromkeys(SIDES, 0)

    def add(self, entry: Entry) -> None:
        """Queue an entry on its side."""
        self._entries[entry.lo] = entry
        self._counts[entry.side] += entry.hi - entry.lo
        self._push(entry)

    def _push(self, entry: Entry) -> None:
        item = (entry.priority, entry.lo, entry)
        heappush((self._slow if entry.slow else self._fast)[entry.side], item)
        if entry.device is not None:
            near = entry.ratio if entry.side == DEVICE else -entry.ratio
            heappush(self._near[entry.side], (near, entry.lo, entry))

    def take(self, entry: Entry, count: int) -> None:
        """Remove the first ``count`` serials of the entry; the rest keeps waiting."""
        entry.taken = True
        del self._entries[entry.lo]
        self._counts[entry.side] -= entry.hi - entry.lo
        if entry.lo + count < entry.hi:
            rest = Entry(entry.lo + count, entry.hi, entry.cpu, entry.device)
            rest.inspect, rest.side, rest.slow = entry.inspect, entry.side, entry.slow
            rest.priority = entry.priority + count
            self.add(rest)

    def first(self, side: str, fast_only: bool = False) -> Entry | None:
        """The entry of the side that should start first; with ``fast_only`` a slow one only if there is no other."""
        fast, slow = self._top(self._fast[side], side), self._top(self._slow[side], side)
        if fast is None or slow is None:
            return fast or slow
        return fast if fast_only or fast.priority <= slow.priority else slow

    def nearest(self, side: str) -> Entry | None:
        """The entry of the side that is nearest to the threshold: the one that the other lane would steal."""
        return self._top(self._near[side], side)

    def at(self, lo: int) -> Entry | None:
        """The entry that begins with serial ``lo``."""
        return self._entries.get(lo)

    def oldest(self) -> Entry | None:
        """The entry with the lowest serial (a scan: only asked when memory is short)."""
        return self._entries[min(self._entries)] if self._entries else None

    def move(self, threshold: float) -> None:
        """Put every entry on the side of the threshold that its ratio is on."""
        for side, other in ((DEVICE, CPU), (CPU, DEVICE)):
            while (entry := self.nearest(side)) is not None:
                if (entry.ratio >= threshold) == (side == DEVICE):
                    break
                self._counts[side] -= entry.hi - entry.lo
                self._counts[other] += entry.hi - entry.lo
                entry.side = other
                self._push(entry)

    def count(self, side: str) -> int:
        """How many samples wait on the side."""
        return self._counts[side]

    def costed(self) -> Iterator[Entry]:
        """Entries whose costs are known for both kinds of lane."""
        return (e for e in self._entries.values() if e.cpu is not None and e.device is not None)

    def __len__(self) -> int:
        return len(self._entries)

    @staticmethod
    def _top(heap: _Heap, side: str) -> Entry | None:
        while heap:
            entry = heap[0][2]
            if not entry.taken and entry.side == side:
                return entry
            heappop(heap)
        return None
