"""Tickets that wait for a lane, in the order in which they should start.

An entry is a run of neighbouring serials, from which leases are cut, or one sample that travels alone. Each entry waits
on one *side*, which has a lane's name: the CPU's, or that of its *home*, ``DEVICE`` for any device lane, or that of the
one that may have it where batches live on several devices. All heaps delete lazily: an item counts only while its entry
still waits on the heap's side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

from minato_gpu.samples import TicketId
from minato_gpu.scheduling.messages import CPU
from minato_gpu.scheduling.messages import DEVICE as DEVICE
from minato_gpu.scheduling.places import Place
from minato_gpu.scheduling.plans import Plan, Step, hull, rest

NEAR = 15  # heap items looked at for one to steal
FASTER = 1e300  # a ratio above every finite threshold, and below the infinite one that sends nothing to a device
INFINITE = float("inf")


class Entry:
    """A run of serials ``lo`` to ``hi`` with the predicted seconds of each on either kind of lane.

    Of a run ``cpu`` is the mean; ``sums`` are its costs added up, from serial ``begin`` on (empty: all cost the same).
    A cost is None when unknown, and ``device`` is None when the sample cannot run there. ``ratio`` says how much dearer
    the CPU is than the device: the larger, the more the device lane gains. ``home`` is the side of the
    device lane that may have it.
    ``inspect`` marks tickets whose costs must be read from their headers first, ``read`` those whose host read is held.

    One that can be cut has the plans ``between`` as well, and the ``steps`` between those worth having. ``at``: the
    stage that its sample has come to (0: none is done but the host read); costs are those of what is left. ``haste``:
    for its cuts the threshold counts as no higher than this; 1.0 for a sample that would hold up the window, which
    then takes the fastest of its plans, however scarce the device is.
    """

    __slots__ = (
        *("at", "begin", "between", "charge", "cold", "cpu", "device", "haste", "hi", "home", "inspect", "lo"),
        *("place", "predicted", "priority", "ratio", "read", "side", "slow", "steps", "sums", "waits"),
    )

    def __init__(
        self,
        lo: TicketId,
        hi: TicketId,
        place: Place,
        cpu: float | None = None,
        device: float | None = None,
    ) -> None:
        self.lo = lo
        self.hi = hi
        self.cpu = cpu
        self.device = device
        self.predicted: tuple[float, float] | None = None  # on either lane, nan for what was guessed; None: both known
        self.inspect = False
        self.read = False
        self.place = place
        self.home = place.admitted.home
        self.priority = float(place.first)
        self.cold = False
        self.side = CPU
        self.slow = False
        self.waits = False
        self.at = 0
        self.begin = lo
        self.sums: Sequence[float] = ()
        self.between: Sequence[Plan] = ()
        self.steps: tuple[Step, ...] | None = None
        self.haste = FASTER
        self.charge: float | None = None  # the seconds that it counts with where it waits
        self.ratio = 0.0 if cpu is None or device is None else cpu / device if device > 0 else FASTER

    @classmethod
    def run(cls, first: TicketId, place: Place, costs: Sequence[float]) -> Entry:
        """Serials from ``first`` on, which cost so much on the CPU; nan where that is not known."""
        sums = list(accumulate(costs, initial=0.0))
        known = sums[-1] == sums[-1]
        entry = cls(first, TicketId(first + len(costs)), place, sums[-1] / len(costs) if known else None)
        if known:
            entry.sums = sums
        return entry

    def seconds(self, count: int, each: float) -> float:
        """What the first ``count`` cost, predicted; ``each``: where all cost the same."""
        if not self.sums:
            return count * each
        at = self.lo - self.begin
        return self.sums[at + count] - self.sums[at]

    def within(self, seconds: float, each: float) -> int:
        """How many of the first take no longer than so many seconds together; at least one."""
        if not self.sums:
            return max(1, int(seconds / each)) if each > 0 else 1
        at = self.lo - self.begin
        return max(1, bisect_right(self.sums, self.sums[at] + seconds, at) - at - 1)

    def part(self, lo: TicketId, hi: TicketId) -> Entry:
        """A new entry for some of the serials, otherwise the same."""
        entry = Entry(lo, hi, self.place, self.cpu, self.device)
        entry.begin, entry.sums = self.begin, self.sums
        entry.inspect, entry.read, entry.side, entry.slow = self.inspect, self.read, self.side, self.slow
        entry.priority, entry.cold, entry.ratio = self.priority, self.cold, self.ratio
        entry.predicted = self.predicted
        entry.at, entry.between, entry.steps, entry.haste = self.at, self.between, self.steps, self.haste
        if self.sums:
            entry.cpu = (self.sums[hi - self.begin] - self.sums[lo - self.begin]) / (hi - lo)
        return entry

    def set_plans(self, between: Sequence[Plan]) -> None:
        """The sample can be cut between two stages; the steps are the cuts worth having (see plans.py).

        The more steps the threshold allows, the more of the sample goes to the device. The entry's ratio is that of the
        last step, if that one leaves everything to the device: where the threshold allows it, the entry waits for the
        device. If the last step leaves a part to the CPU, the ratio is 0 and the entry waits on the CPU's side,
        whatever the threshold; ``cut`` says where it is handed over. Example: steps of ratios 3 and 2, the second of
        which leaves everything to the device. At a threshold of 4 the CPU does all of it, at 2.5 the CPU begins it and
        the device ends it, at 1 the device does all of it. A single step that leaves everything to the device is no
        cut: such an entry waits like that of any other sample.
        """
        assert self.cpu is not None
        self.between = between
        steps = hull(self.cpu, self.device, between)
        if steps and (len(steps) > 1 or steps[-1].plan.cpu > 0):
            self.steps = steps

    def suit(self, patience: float) -> None:
        """Say anew which lane suits it. What takes the CPU longer than ``patience`` seconds would hold up the window:
        it takes the fastest of its plans, whatever the ratio."""
        urgent = self.cpu is not None and self.cpu > patience
        if self.steps is not None:
            last = self.steps[-1]
            gain = last.ratio if not urgent else FASTER if last.ratio > 1.0 else 0.0
            self.ratio, self.haste = gain if last.plan.cpu <= 0 else 0.0, 1.0 if urgent else FASTER
        elif self.cpu is not None and self.device is not None:
            faster = self.device <= 0 or (urgent and self.device < self.cpu)
            self.ratio = FASTER if faster else self.cpu / self.device

    def cut(self, threshold: float) -> Plan | None:
        """The plan to begin with on the CPU at this threshold; None: it stays there to the end."""
        chosen: Plan | None = None
        if self.steps is not None and threshold <= FASTER:
            limit = min(threshold, self.haste)
            for step in self.steps:
                if step.ratio < limit or step.plan.cpu <= 0:
                    break
                chosen = step.plan
        return chosen

    def rest(self, serial: TicketId, split: int) -> Entry:
        """A new entry for one of the serials, whose stages before ``split`` are done."""
        entry = Entry(serial, TicketId(serial + 1), self.place)
        entry.read, entry.at, entry.cold = True, split, self.cold
        if self.cpu is not None:
            entry.cpu, entry.device, entry.between = rest(self.cpu, self.between, split)
        return entry

    def __lt__(self, other: Entry) -> bool:
        return False  # equal heap keys only meet when an entry was moved away and back


_Heap = list[tuple[float, TicketId, Entry]]


class Waiting:
    """Entries by side, by start priority (slow ones apart) and by nearness to the routing threshold.

    Those that a lane may steal from a side are kept apart by their home. ``homes``: the sides beside the CPU's.
    """

    def __init__(self, homes: tuple[str, ...] = (DEVICE,)) -> None:
        self.homes = homes
        self._sides = (CPU, *homes)
        self._fast: dict[str, _Heap] = {side: [] for side in self._sides}
        self._slow: dict[str, _Heap] = {side: [] for side in self._sides}
        self._near: dict[tuple[str, str], _Heap] = {(side, home): [] for home in homes for side in (CPU, home)}
        self._entries: dict[TicketId, Entry] = {}
        self._oldest: list[TicketId] = []
        self.unread = 0  # tickets whose costs must be read from their headers first
        self._seconds = dict.fromkeys(self._sides, 0.0)
        self._samples = dict.fromkeys(self._sides, 0)
        self._limits = dict.fromkeys(homes, INFINITE)  # the threshold, for entries of each home

    def add(self, entry: Entry) -> None:
        """Queue an entry on its side."""
        entry.waits = True
        self._entries[entry.lo] = entry
        entry.place.waiting += entry.hi - entry.lo
        if entry.inspect:
            self.unread += entry.hi - entry.lo
        heappush(self._oldest, entry.lo)
        if len(self._oldest) > 64 + 4 * len(self._entries):
            self._oldest = sorted(self._entries)
        self._push(entry, 1)

    def _push(self, entry: Entry, sign: int) -> None:
        self._account(entry, sign)
        item = (entry.priority, entry.lo, entry)
        most = 64 + 4 * len(self._entries)
        heap = (self._slow if entry.slow else self._fast)[entry.side]
        heappush(heap, item)
        if len(heap) > most:
            self._sweep(heap, entry.side)
        if entry.device is not None:
            near = -entry.ratio if entry.side == CPU else entry.ratio
            heap = self._near[entry.side, entry.home]
            heappush(heap, (near, entry.lo, entry))
            if len(heap) > most:
                self._sweep(heap, entry.side)

    @staticmethod
    def _sweep(heap: _Heap, side: str) -> None:
        """Drop the dead items, which are most of the heap, so that it never outgrows the window."""
        heap[:] = [item for item in heap if item[2].waits and item[2].side == side]
        heapify(heap)

    def _account(self, entry: Entry, sign: int) -> None:
        self._samples[entry.side] += sign * (entry.hi - entry.lo)
        cost = entry.cpu if entry.side == CPU else entry.device
        if entry.steps is not None and entry.side == CPU:
            if sign > 0:
                plan = entry.cut(self._limits[entry.home])
                entry.charge = entry.cpu if plan is None else plan.cpu
            cost = entry.charge
        if cost:
            self._seconds[entry.side] += sign * cost * (entry.hi - entry.lo)

    def take(self, entry: Entry, count: int) -> None:
        """Remove the first ``count`` serials of the entry; the rest keeps waiting."""
        entry.waits = False
        del self._entries[entry.lo]
        entry.place.waiting -= entry.hi - entry.lo
        if entry.inspect:
            self.unread -= entry.hi - entry.lo
        self._account(entry, -1)
        if entry.lo + count < entry.hi:
            self.add(entry.part(TicketId(entry.lo + count), entry.hi))
        if not self._entries:
            self._seconds = dict.fromkeys(self._sides, 0.0)  # what rounding left behind

    def first(self, side: str, patience: float = 0.0) -> Entry | None:
        """The entry of the side that should start first; slow ones start ``patience`` positions later than they ask."""
        fast, slow = self._top(self._fast[side], side), self._top(self._slow[side], side)
        if fast is None or slow is None:
            return fast or slow
        return fast if (fast.priority, fast.lo) < (slow.priority + patience, slow.lo) else slow

    def first_of(self, home: str) -> Entry | None:
        """The entry of this home that should start first, where all wait on the CPU's side (looks at every one)."""
        mine = (entry for entry in self._entries.values() if entry.home == home)
        return min(mine, key=lambda entry: (entry.priority, entry.lo), default=None)

    def first_inspected(self) -> Entry | None:
        """The entry on the CPU's side that should start first of those of which nothing is to be read before."""
        ready = (entry for entry in self._entries.values() if entry.side == CPU and not entry.inspect)
        return min(ready, key=lambda entry: (entry.priority, entry.lo), default=None)

    def nearest(self, side: str, home: str = DEVICE) -> Entry | None:
        """The entry of the side, and of this home, that is nearest to the threshold: the other lane would steal it."""
        return self._top(self._near[side, home], side)

    def near(self, side: str, home: str = DEVICE) -> list[Entry]:
        """A few entries of the side, and of this home, that are near to the threshold, nearest first."""
        heap = self._near[side, home]
        self._top(heap, side)
        items = [item for item in heap[:NEAR] if item[2].waits and item[2].side == side]
        return [item[2] for item in sorted(items)]

    def at(self, lo: TicketId) -> Entry | None:
        """The entry that begins with serial ``lo``."""
        return self._entries.get(lo)

    def oldest(self) -> Entry | None:
        """The entry with the lowest serial."""
        heap = self._oldest
        while heap and heap[0] not in self._entries:
            heappop(heap)
        return self._entries[heap[0]] if heap else None

    def move(self, threshold: float, rank: Callable[[Entry], None], closed: Collection[str] = ()) -> None:
        """Put every entry on the side of the threshold that its ratio is on; ``rank`` then says when it starts.

        ``closed``: homes whose lane takes nothing; their entries wait for the CPU.
        """
        for home in self.homes:
            limit = self._limits[home] = INFINITE if home in closed else threshold
            for side, other in ((home, CPU), (CPU, home)):
                while (entry := self.nearest(side, home)) is not None:
                    if (entry.ratio >= limit) == (side == home):
                        break
                    self._account(entry, -1)
                    entry.side = other
                    rank(entry)
                    self._push(entry, 1)

    def read_first(self, mark: Callable[[Entry], None]) -> None:
        """Have what is to be known of tickets of unknown cost read from their headers, as ``mark`` says in an entry.
        ``reorder`` is to follow."""
        for entry in self._entries.values():
            if entry.cpu is not None or entry.inspect or entry.read:
                continue
            mark(entry)
            self.unread += entry.hi - entry.lo

    def reorder(self, rank: Callable[[Entry], None]) -> None:
        """Rank every entry anew (lanes have opened or were lost)."""
        entries = list(self._entries.values())
        for heap in (*self._fast.values(), *self._slow.values(), *self._near.values()):
            heap.clear()
        self._seconds = dict.fromkeys(self._sides, 0.0)
        self._samples = dict.fromkeys(self._sides, 0)
        for entry in entries:
            rank(entry)
            self._push(entry, 1)

    def seconds(self, side: str) -> float:
        """Predicted seconds of what waits on the side; entries of unknown cost are left out."""
        return self._seconds[side]

    def samples(self, side: str) -> int:
        """How many samples wait on the side."""
        return self._samples[side]

    def costed(self) -> Iterator[Entry]:
        """Entries whose costs are known for both kinds of lane, or that can be cut."""
        return (
            entry
            for entry in self._entries.values()
            if entry.cpu is not None and (entry.device is not None or entry.steps is not None)
        )

    def __len__(self) -> int:
        return len(self._entries)

    @staticmethod
    def _top(heap: _Heap, side: str) -> Entry | None:
        while heap:
            entry = heap[0][2]
            if entry.waits and entry.side == side:
                return entry
            heappop(heap)
        return None
