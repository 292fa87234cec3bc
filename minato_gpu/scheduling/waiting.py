"""Tickets that wait for a lane, in the order in which they should start.

``Waiting`` holds ``Entry``s: runs of neighbouring serials, from which leases are cut, or single samples. Each entry
waits on one *side*: the CPU's, or its *home*, which is ``DEVICE`` for any device lane, or the name of the one lane that
may have it where batches live on several devices. All heaps delete lazily: an item counts only while its entry still
waits on the heap's side.
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

STEAL_CANDIDATES = 15  # heap items examined for one to steal
FASTER = 1e300  # a ratio above every finite threshold, and below the infinite one that sends nothing to a device
INFINITE = float("inf")


class Entry:
    """A run of serials ``lo`` to ``hi`` with predicted seconds per sample on either kind of lane."""

    __slots__ = (
        *("begin", "between", "cold", "cpu", "device", "hi", "home", "inspect", "lo", "max_threshold", "place"),
        *("predicted", "priority", "queued_s", "ratio", "read", "side", "slow", "stage", "steps", "sums", "waits"),
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
        self.cpu = cpu  # seconds per sample, the mean of a run; None: unknown
        self.device = device  # seconds per sample; None: cannot run there
        self.predicted: tuple[float, float] | None = None  # on either lane, nan for what was guessed; None: both known
        self.inspect = False  # costs must be read from headers first
        self.read = False  # the result of the host read is stored
        self.place = place
        self.home = place.admitted.home  # side of the device lane that may have it
        self.priority = float(place.first)  # lower ones start first
        self.cold = False  # admitted while nothing was ready for the consumer
        self.side = CPU
        self.slow = False
        self.waits = False  # queued, for lazy deletion
        self.stage = 0  # stage that the sample has reached; costs are those of the rest; 0: none but the host read
        self.begin = lo  # serial of ``sums[0]``
        self.sums: Sequence[float] = ()  # cumulated CPU seconds of a run; empty: all cost the same
        self.between: Sequence[Plan] = ()  # divided plans
        self.steps: tuple[Step, ...] | None = None  # between the plans worth having
        self.max_threshold = FASTER  # upper limit of the threshold for split points; 1.0: urgent, take the fastest plan
        self.queued_s: float | None = None  # seconds counted for it where it waits
        # cpu / device: the larger, the more the device gains
        self.ratio = 0.0 if cpu is None or device is None else cpu / device if device > 0 else FASTER

    @classmethod
    def run(cls, first: TicketId, place: Place, costs: Sequence[float]) -> Entry:
        """Makes an entry of serials from ``first`` on with these CPU seconds each; if one is nan, all costs count as
        unknown."""
        sums = list(accumulate(costs, initial=0.0))
        known = sums[-1] == sums[-1]
        entry = cls(first, TicketId(first + len(costs)), place, sums[-1] / len(costs) if known else None)
        if known:
            entry.sums = sums
        return entry

    def seconds(self, count: int, each: float) -> float:
        """Returns the predicted seconds of the first ``count`` samples. ``each``: seconds of one, where no single costs
        are known (``sums``)."""
        if not self.sums:
            return count * each
        at = self.lo - self.begin
        return self.sums[at + count] - self.sums[at]

    def within(self, seconds: float, each: float) -> int:
        """Returns how many samples from the first on take at most ``seconds`` in all; at least one, and perhaps more
        than the entry holds. ``each``: as in ``seconds``."""
        if not self.sums:
            return max(1, int(seconds / each)) if each > 0 else 1
        at = self.lo - self.begin
        return max(1, bisect_right(self.sums, self.sums[at] + seconds, at) - at - 1)

    def part(self, lo: TicketId, hi: TicketId) -> Entry:
        """Makes an entry for serials ``lo`` to ``hi`` of this one, otherwise equal; it does not wait yet."""
        entry = Entry(lo, hi, self.place, self.cpu, self.device)
        entry.begin, entry.sums = self.begin, self.sums
        entry.inspect, entry.read, entry.side, entry.slow = self.inspect, self.read, self.side, self.slow
        entry.priority, entry.cold, entry.ratio = self.priority, self.cold, self.ratio
        entry.predicted = self.predicted
        entry.stage, entry.between, entry.steps = self.stage, self.between, self.steps
        entry.max_threshold = self.max_threshold
        if self.sums:
            entry.cpu = (self.sums[hi - self.begin] - self.sums[lo - self.begin]) / (hi - lo)
        return entry

    def set_plans(self, between: Sequence[Plan]) -> None:
        """Sets the divided plans of the sample and keeps the steps worth taking (see plans.py).

        The more steps the threshold allows, the more of the sample goes to the device. The entry's ratio is that of the
        last step if it leaves everything to the device: where the threshold allows it, the entry waits for the device.
        If the last step leaves a part to the CPU, the ratio is 0 and the entry waits on the CPU's side; ``cut`` says
        where it is handed over. Example: steps of ratios 3 and 2, the second of which leaves everything to the device.
        At a threshold of 4 the CPU does all of it, at 2.5 the CPU begins and the device ends it, at 1 the device does
        all. A single step that leaves everything to the device splits nothing: the entry waits like any other.
        """
        assert self.cpu is not None
        self.between = between
        steps = hull(self.cpu, self.device, between)
        if steps and (len(steps) > 1 or steps[-1].plan.cpu > 0):
            self.steps = steps

    def update_ratio(self, patience: float) -> None:
        """Recomputes ``ratio``, where costs are known. A sample of more than ``patience`` CPU seconds would hold up the
        window: it takes its fastest plan."""
        urgent = self.cpu is not None and self.cpu > patience
        if self.steps is not None:
            last = self.steps[-1]
            gain = last.ratio if not urgent else FASTER if last.ratio > 1.0 else 0.0
            self.ratio, self.max_threshold = gain if last.plan.cpu <= 0 else 0.0, 1.0 if urgent else FASTER
        elif self.cpu is not None and self.device is not None:
            faster = self.device <= 0 or (urgent and self.device < self.cpu)
            self.ratio = FASTER if faster else self.cpu / self.device

    def cut(self, threshold: float) -> Plan | None:
        """Returns the plan that the sample begins on the CPU at this threshold; None: it stays there to the end."""
        chosen: Plan | None = None
        if self.steps is not None and threshold <= FASTER:
            limit = min(threshold, self.max_threshold)
            for step in self.steps:
                if step.ratio < limit or step.plan.cpu <= 0:
                    break
                chosen = step.plan
        return chosen

    def rest(self, serial: TicketId, split: int) -> Entry:
        """Makes an entry for one serial whose stages before ``split`` are done."""
        entry = Entry(serial, TicketId(serial + 1), self.place)
        entry.read, entry.stage, entry.cold = True, split, self.cold
        if self.cpu is not None:
            entry.cpu, entry.device, entry.between = rest(self.cpu, self.between, split)
        return entry

    def __lt__(self, other: Entry) -> bool:
        return False  # equal heap keys occur only if an entry was moved away and back


_Heap = list[tuple[float, TicketId, Entry]]


class Waiting:
    """The waiting entries by side, by start priority (slow ones apart), and by nearness to the routing threshold.

    Entries that another lane may steal from a side are kept by their home. ``homes``: the sides beside the CPU's.
    """

    def __init__(self, homes: tuple[str, ...] = (DEVICE,)) -> None:
        self.homes = homes
        self._sides = (CPU, *homes)
        self._fast: dict[str, _Heap] = {side: [] for side in self._sides}
        self._slow: dict[str, _Heap] = {side: [] for side in self._sides}
        self._near: dict[tuple[str, str], _Heap] = {(side, home): [] for home in homes for side in (CPU, home)}
        self._entries: dict[TicketId, Entry] = {}
        self._oldest: list[TicketId] = []
        self.unread = 0  # tickets marked for inspection
        # by side: predicted seconds of what waits there, without entries of unknown cost, and the number of samples
        self.seconds = dict.fromkeys(self._sides, 0.0)
        self.samples = dict.fromkeys(self._sides, 0)
        self._limits = dict.fromkeys(homes, INFINITE)  # the threshold by home

    def add(self, entry: Entry) -> None:
        """Queues an entry on its side."""
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
        """Drops stale items, so that the heap never outgrows the window."""
        heap[:] = [item for item in heap if item[2].waits and item[2].side == side]
        heapify(heap)

    def _account(self, entry: Entry, sign: int) -> None:
        self.samples[entry.side] += sign * (entry.hi - entry.lo)
        cost = entry.cpu if entry.side == CPU else entry.device
        if entry.steps is not None and entry.side == CPU:
            if sign > 0:
                plan = entry.cut(self._limits[entry.home])
                entry.queued_s = entry.cpu if plan is None else plan.cpu
            cost = entry.queued_s
        if cost:
            self.seconds[entry.side] += sign * cost * (entry.hi - entry.lo)

    def take(self, entry: Entry, count: int) -> None:
        """Removes the entry, as its first ``count`` serials are taken; the rest waits on as a new entry."""
        entry.waits = False
        del self._entries[entry.lo]
        entry.place.waiting -= entry.hi - entry.lo
        if entry.inspect:
            self.unread -= entry.hi - entry.lo
        self._account(entry, -1)
        if entry.lo + count < entry.hi:
            self.add(entry.part(TicketId(entry.lo + count), entry.hi))
        if not self._entries:
            self.seconds = dict.fromkeys(self._sides, 0.0)  # drops rounding errors

    def first(self, side: str, patience: float = 0.0) -> Entry | None:
        """Returns the entry of the side that should start first; None if none waits there. Slow ones start ``patience``
        positions later than their priority."""
        fast, slow = self._top(self._fast[side], side), self._top(self._slow[side], side)
        if fast is None or slow is None:
            return fast or slow
        return fast if (fast.priority, fast.lo) < (slow.priority + patience, slow.lo) else slow

    def first_inspected(self) -> Entry | None:
        """Returns the entry on the CPU's side that should start first of those that need no inspection, or None. A
        linear search."""
        ready = (entry for entry in self._entries.values() if entry.side == CPU and not entry.inspect)
        return min(ready, key=lambda entry: (entry.priority, entry.lo), default=None)

    def nearest(self, side: str, home: str = DEVICE) -> Entry | None:
        """Returns the entry of this side and home that is nearest to the threshold, which the other lane would
        steal; None if there is none."""
        return self._top(self._near[side, home], side)

    def near(self, side: str, home: str = DEVICE) -> list[Entry]:
        """Returns at most ``STEAL_CANDIDATES`` entries of this side and home near to the threshold, nearest first."""
        heap = self._near[side, home]
        self._top(heap, side)
        items = [item for item in heap[:STEAL_CANDIDATES] if item[2].waits and item[2].side == side]
        return [item[2] for item in sorted(items)]

    def at(self, lo: TicketId) -> Entry | None:
        """Returns the entry that begins with serial ``lo``, or None."""
        return self._entries.get(lo)

    def oldest(self) -> Entry | None:
        """Returns the entry with the lowest serial; None if nothing waits."""
        heap = self._oldest
        while heap and heap[0] not in self._entries:
            heappop(heap)
        return self._entries[heap[0]] if heap else None

    def move(self, threshold: float, rank: Callable[[Entry], None], closed: Collection[str] = ()) -> None:
        """Moves every entry to the side of the threshold on which its ratio is; ``rank`` then sets its priority.

        ``closed``: homes whose lanes take nothing; their entries wait for the CPU.
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

    def require_inspection(self, mark: Callable[[Entry], None]) -> None:
        """Calls ``mark``, which sets ``inspect``, for every entry of unknown cost that has not been read, and counts
        its tickets. ``reorder`` must follow."""
        for entry in self._entries.values():
            if entry.cpu is not None or entry.inspect or entry.read:
                continue
            mark(entry)
            self.unread += entry.hi - entry.lo

    def reorder(self, rank: Callable[[Entry], None]) -> None:
        """Calls ``rank``, which sets costs, side or priority, for every entry, and queues it accordingly."""
        entries = list(self._entries.values())
        for heap in (*self._fast.values(), *self._slow.values(), *self._near.values()):
            heap.clear()
        self.seconds = dict.fromkeys(self._sides, 0.0)
        self.samples = dict.fromkeys(self._sides, 0)
        for entry in entries:
            rank(entry)
            self._push(entry, 1)

    def costed(self) -> Iterator[Entry]:
        """Yields entries whose costs are known for both kinds of lane, or that can be divided."""
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
