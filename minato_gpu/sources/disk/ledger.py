"""The accounts: what may be written, what has been, what is free again. Every change is one transaction of the index.

What counts against the budget ("charged") is, of each segment, what its writer may still write, what entries hold,
and what is doomed: no entry any more, but not given back to the disk yet. So bytes are charged before they are
written and until they are free, and a process that is killed anywhere between leaves an account that is true:

- killed before its entry is written down: what lies beyond the segment's end is cut off by who takes the segment over;
- killed between dooming and freeing: who opens the directory next frees all of that segment which is no entry's. Space
  that was an entry's is never written again, so that freeing it twice does no harm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import lmdb

from minato_gpu.sources.disk.files import OpenFile
from minato_gpu.sources.disk.index import Index
from minato_gpu.sources.disk.records import DamagedIndexError, Entry, Place, Segment, Total, allotted

_CHARGED, _NEXT = b"charged", b"next"
Doomed = dict[Place, int]  # bytes, by where they are


class Ledger:
    """The accounts in ``index``. ``block``: bytes that the disk gives out and takes back in one piece."""

    def __init__(self, index: Index, block: int) -> None:
        self._index = index
        self._block = block

    def charged(self) -> int:
        """Bytes of disk that segments take at most."""
        with self._index.read() as transaction:
            return self._total(transaction, _CHARGED)

    def accounts(self, numbers: Iterable[int] | None = None) -> list[Segment]:
        """Of these segments, as far as there are such; else of all, by number."""
        with self._index.read() as transaction:
            if numbers is None:
                return list(self._index.segments.items(transaction))
            found = [self._account(transaction, number) for number in numbers]
        return [segment for segment in found if segment is not None]

    def begin(self, create: Callable[[int], OpenFile]) -> tuple[int, OpenFile]:
        """Open an account for a new segment, and have its file made in the same transaction."""
        with self._index.write() as transaction:
            number = self._total(transaction, _NEXT)
            file = create(number)
            self._index.totals.put(transaction, Total(_NEXT, number + 1))
            self._index.segments.put(transaction, Segment(number))
        return number, file

    def lease(self, number: int, wanted: int, step: int, budget: int) -> int:
        """Allow a segment's writer ``wanted`` bytes from its end on, and up to ``step`` where the budget has them.

        Returns how many it may write now; 0 where the budget has not as many as are wanted.
        """
        with self._index.write() as transaction:
            segment = self._get(transaction, number)
            missing = wanted - (segment.top - segment.end)
            room = budget - self._index.nbytes() - self._index.headroom - self._total(transaction, _CHARGED)
            room = room // self._block * self._block
            if room < missing:
                return 0
            top = segment.top + max(min(max(missing, step), room), 0)
            self._change(transaction, segment, segment._replace(top=top))
        return top - segment.end

    def add(self, entry: Entry) -> tuple[bool, Doomed]:
        """Write down an entry whose bytes lie at the end of its segment. False where another process was first.

        Also returns what was kept of another version, which is doomed.
        """
        with self._index.write() as transaction:
            known = self._index.entries.get(transaction, entry.key)
            if known is not None and known.version == entry.version:
                return False, {}
            doomed = {} if known is None else self._doom(transaction, [known])
            self._index.entries.put(transaction, entry)
            segment = self._get(transaction, entry.segment)
            size = allotted(entry.length, self._block)
            self._change(transaction, segment, segment._replace(end=segment.end + size, live=segment.live + size))
        return True, doomed

    def doom(self, keys: Iterable[bytes], before: float = math.inf) -> Doomed:
        """Take entries out, but for those that have been used at ``before`` or since; returns the space that is to be
        freed."""
        with self._index.write() as transaction:
            found = (self._index.entries.get(transaction, key) for key in keys)  # one by one: a key may come twice
            return self._doom(transaction, (each for each in found if each is not None and each.used_at < before))

    def doom_this(self, entry: Entry) -> Doomed:
        """The same for an entry, if it is still this one."""
        with self._index.write() as transaction:
            found = self._index.entries.get(transaction, entry.key)
            if found is None or (found.segment, found.offset) != (entry.segment, entry.offset):
                return {}
            return self._doom(transaction, [found])

    def used(self, keys: Iterable[bytes], at: float) -> None:
        """Write down that these have been used; a record keeps its size, so that the index does not grow."""
        with self._index.write() as transaction:
            for key in keys:
                entry = self._index.entries.get(transaction, key)
                if entry is not None:
                    self._index.entries.put(transaction, entry._replace(used_at=at))

    def settle(self, freed: Mapping[int, int], delete: Callable[[int], None]) -> None:
        """Of segments, by number: so many doomed bytes are free on disk again. Those that nobody needs any more are
        deleted."""
        with self._index.write() as transaction:
            for number, nbytes in freed.items():
                segment = self._account(transaction, number)
                if segment is None:  # another process has deleted it
                    continue
                if segment.is_over:
                    delete(number)
                    self._index.segments.pop(transaction, segment.key)
                    self._charge(transaction, -segment.charged)
                else:
                    self._change(transaction, segment, segment._replace(doomed=segment.doomed - nbytes))

    def release(self, number: int, full: bool) -> None:
        """End a writer's lease. ``full``: nobody is to write to the segment again."""
        with self._index.write() as transaction:
            segment = self._get(transaction, number)
            self._change(transaction, segment, segment._replace(top=segment.end, full=full))

    def resume(self, number: int, cut: Callable[[int], None]) -> int | None:
        """Take over the lease of a writer that is gone, and have the file cut off at its end, which is returned.

        None where the segment has become full in the meantime.
        """
        with self._index.write() as transaction:
            segment = self._account(transaction, number)
            if segment is None or segment.full:
                return None
            cut(segment.end)
            self._change(transaction, segment, segment._replace(top=segment.end))
        return segment.end

    def reconcile(self, there: Collection[int], delete: Callable[[int], None]) -> Doomed:
        """Count anew what entries hold, and forget what is of files that are not there. Returns what is to be freed: of
        segments in which anything was doomed, all that is no entry's.

        ``there``: the numbers of all segment files; those without account are deleted. Only while no other process has
        the directory open.
        """
        with self._index.write() as transaction:
            known = list(self._index.segments.items(transaction))
            accounts = {each.number: each._replace(top=0, live=0) for each in known if each.number in there}
            for number in {*there} - accounts.keys():
                delete(number)
            for segment in known:
                if segment.number not in there:
                    self._index.segments.pop(transaction, segment.key)
            doomed = self._recount(transaction, accounts)
            for segment in accounts.values():
                self._index.segments.put(transaction, segment)
            self._index.totals.put(transaction, Total(_CHARGED, sum(each.charged for each in accounts.values())))
            first = max(self._total(transaction, _NEXT), *there, *accounts, 0) + 1
            self._index.totals.put(transaction, Total(_NEXT, first))
        return doomed

    def _recount(self, transaction: lmdb.Transaction, accounts: dict[int, Segment]) -> Doomed:
        lost: list[bytes] = []
        held: dict[int, Doomed] = defaultdict(dict)  # by entries, of segments in which anything is doomed
        for entry in self._index.entries.items(transaction):
            segment = accounts.get(entry.segment)
            if segment is None:
                lost.append(entry.key)
                continue
            size = allotted(entry.length, self._block)
            end = max(segment.end, entry.offset + size)
            accounts[entry.segment] = segment._replace(end=end, live=segment.live + size)
            if segment.doomed:
                held[entry.segment][entry.segment, entry.offset] = size
        for key in lost:
            self._index.entries.pop(transaction, key)
        doomed: Doomed = {}
        for number, segment in accounts.items():
            if segment.doomed:
                gaps = dict(_gaps(segment, held[number]))
                doomed |= gaps
                segment = segment._replace(doomed=sum(gaps.values()))
            accounts[number] = segment._replace(top=segment.end)
        return doomed

    def _doom(self, transaction: lmdb.Transaction, entries: Iterable[Entry]) -> Doomed:
        doomed = {}
        for entry in entries:
            self._index.entries.pop(transaction, entry.key)
            size = allotted(entry.length, self._block)
            doomed[entry.segment, entry.offset] = size
            segment = self._get(transaction, entry.segment)
            new = segment._replace(live=segment.live - size, doomed=segment.doomed + size)
            self._change(transaction, segment, new)
        return doomed

    def _account(self, transaction: lmdb.Transaction, number: int) -> Segment | None:
        return self._index.segments.get(transaction, Segment(number).key)

    def _get(self, transaction: lmdb.Transaction, number: int) -> Segment:
        found = self._account(transaction, number)
        if found is None:
            raise DamagedIndexError(f"there is no account of segment {number}")
        return found

    def _change(self, transaction: lmdb.Transaction, old: Segment, new: Segment) -> None:
        """Write down an account, and what is charged with it."""
        self._index.segments.put(transaction, new)
        if new.charged != old.charged:
            self._charge(transaction, new.charged - old.charged)

    def _charge(self, transaction: lmdb.Transaction, more: int) -> None:
        self._index.totals.put(transaction, Total(_CHARGED, self._total(transaction, _CHARGED) + more))

    def _total(self, transaction: lmdb.Transaction, name: bytes) -> int:
        found = self._index.totals.get(transaction, name)
        return 0 if found is None else found.number


def _gaps(segment: Segment, held: Doomed) -> Iterator[tuple[Place, int]]:
    """What of a segment is no entry's."""
    number, at = segment.number, 0
    for (_, offset), size in [*sorted(held.items()), ((number, segment.end), 0)]:
        if offset > at:
            yield (number, at), offset - at
        at = offset + size
