"""The accounts: what may be written, what has been, what is free again. Every change is one transaction of the index.

What counts against the budget ("charged") is, of each segment, what its writer may still write, what entries hold,
and what is doomed: no entry any more, but not given back to the disk yet. So bytes are charged before they are
written and until they are free, and a process that is killed anywhere between leaves an account that is true:

- killed before its entry is written down: what lies beyond the segment's end is cut off by who takes the segment over;
- killed between dooming and freeing: who opens the directory next frees it. Space that was an entry's is never written
  again, so that freeing it twice does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from itertools import takewhile
from typing import TypeVar

import lmdb

from minato_gpu.sources.disk import records
from minato_gpu.sources.disk.index import Index
from minato_gpu.sources.disk.records import DamagedIndexError, Entry, Place, Segment, allotted, place_key, segment_key

_CHARGED, _NEXT = b"charged", b"next"
_File = TypeVar("_File")
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

    def accounts(self) -> dict[int, Segment]:
        """Of all segments, by number."""
        with self._index.read() as transaction:
            return self._accounts(transaction)

    def accounts_of(self, numbers: Iterable[int]) -> dict[int, Segment]:
        """Of those of these segments that there are."""
        with self._index.read() as transaction:
            found = {number: self._account(transaction, number) for number in numbers}
        return {number: segment for number, segment in found.items() if segment is not None}

    def begin(self, create: Callable[[int], _File]) -> tuple[int, _File]:
        """Open an account for a new segment, and have its file made in the same transaction."""
        with self._index.write() as transaction:
            number = self._total(transaction, _NEXT)
            file = create(number)
            self._set_total(transaction, _NEXT, number + 1)
            self._put(transaction, number, Segment())
        return number, file

    def lease(self, number: int, wanted: int, step: int, budget: int) -> int:
        """Allow a segment's writer ``wanted`` bytes from its end on, and up to ``step`` where the budget has them.

        Returns how many it may write now; 0 where the budget has not as many as are wanted.
        """
        with self._index.write() as transaction:
            segment = self._get(transaction, number)
            missing = wanted - (segment.top - segment.end)
            charged = self._total(transaction, _CHARGED)
            room = budget - self._index.nbytes() - self._index.headroom - charged
            room = room // self._block * self._block
            if room < missing:
                return 0
            top = segment.top + max(min(max(missing, step), room), 0)
            self._put(transaction, number, segment._replace(top=top))
            self._set_total(transaction, _CHARGED, charged + top - segment.top)
        return top - segment.end

    def add(self, entry: Entry) -> tuple[bool, Doomed]:
        """Write down an entry whose bytes lie at the end of its segment. False where another process was first.

        Also returns what was kept of another version, which is doomed.
        """
        with self._index.write() as transaction:
            value = self._index.entries.get(transaction, entry.key)
            doomed = {}
            if value is not None:
                if records.unpack_entry(entry.key, value).version == entry.version:
                    return False, {}
                doomed = self._doom(transaction, [entry.key])
            self._index.entries.put(transaction, entry.key, records.pack_entry(entry))
            segment = self._get(transaction, entry.segment)
            size = allotted(entry.length, self._block)
            new = segment._replace(end=segment.end + size, live=segment.live + size)
            self._put(transaction, entry.segment, new)
        return True, doomed

    def doom(self, keys: Iterable[bytes], before: float = math.inf) -> Doomed:
        """Take entries out, but for those that have been used at ``before`` or since; returns the space that is to be
        freed."""
        with self._index.write() as transaction:
            return self._doom(transaction, keys, before)

    def doom_this(self, entry: Entry) -> Doomed:
        """The same for an entry, if it is still this one."""
        with self._index.write() as transaction:
            value = self._index.entries.get(transaction, entry.key)
            found = None if value is None else records.unpack_entry(entry.key, value)
            same = found is not None and (found.segment, found.offset) == (entry.segment, entry.offset)
            return self._doom(transaction, [entry.key]) if same else {}

    def used(self, keys: Iterable[bytes], at: float) -> None:
        """Write down that these have been used; a record keeps its size, so that the index does not grow."""
        with self._index.write() as transaction:
            for key in keys:
                value = self._index.entries.get(transaction, key)
                if value is not None:
                    entry = records.unpack_entry(key, value)._replace(used_at=at)
                    self._index.entries.put(transaction, key, records.pack_entry(entry))

    def doomed(self) -> Doomed:
        """All that is to be freed, of processes that are gone too."""
        with self._index.read() as transaction:
            found = self._index.doomed.items(transaction)
            return {records.key_place(key): records.unpack_number(key, value) for key, value in found}

    def settle(self, freed: Iterable[Place], touched: Iterable[int], delete: Callable[[int], None]) -> None:
        """Strike off what is free on disk again; of ``touched`` segments delete those that nobody needs any more."""
        with self._index.write() as transaction:
            for place in freed:
                self._strike_off(transaction, place)
            for number in touched:
                segment = self._account(transaction, number)
                if segment is not None and segment.full and not segment.live:
                    delete(number)
                    self._close(transaction, number, segment)

    def release(self, number: int, full: bool) -> None:
        """End a writer's lease. ``full``: nobody is to write to the segment again."""
        with self._index.write() as transaction:
            segment = self._get(transaction, number)
            self._charge(transaction, segment.end - segment.top)
            self._put(transaction, number, segment._replace(top=segment.end, full=full))

    def resume(self, number: int, cut: Callable[[int], None]) -> int | None:
        """Take over the lease of a writer that is gone, and have the file cut off at its end, which is returned.

        None where the segment has become full in the meantime.
        """
        with self._index.write() as transaction:
            segment = self._account(transaction, number)
            if segment is None or segment.full:
                return None
            cut(segment.end)
            self._charge(transaction, segment.end - segment.top)
            self._put(transaction, number, segment._replace(top=segment.end))
        return segment.end

    def reconcile(self, there: Collection[int], delete: Callable[[int], None]) -> None:
        """Count anew what entries and doomed space say, and forget what is of files that are not there.

        ``there``: the numbers of all segment files; those without account are deleted. Only while no other process has
        the directory open.
        """
        with self._index.write() as transaction:
            known = self._accounts(transaction)
            accounts = {
                number: Segment(0, segment.end, 0, 0, segment.full)
                for number, segment in known.items()
                if number in there
            }
            for number in {*there} - accounts.keys():
                delete(number)
            self._recount(transaction, accounts)
            for number in known.keys() - accounts.keys():
                self._index.segments.pop(transaction, segment_key(number))
            for number, segment in accounts.items():
                self._put(transaction, number, segment._replace(top=segment.end))
            self._set_total(transaction, _CHARGED, sum(segment.live + segment.doomed for segment in accounts.values()))
            self._set_total(transaction, _NEXT, max(self._total(transaction, _NEXT), *there, *accounts, 0) + 1)

    def _recount(self, transaction: lmdb.Transaction, accounts: dict[int, Segment]) -> None:
        lost = []
        for key, value in self._index.entries.items(transaction):
            entry = records.unpack_entry(key, value)
            segment = accounts.get(entry.segment)
            if segment is None:
                lost.append(key)
            else:
                size = allotted(entry.length, self._block)
                end = max(segment.end, entry.offset + size)
                accounts[entry.segment] = segment._replace(end=end, live=segment.live + size)
        for key in lost:
            self._index.entries.pop(transaction, key)
        for key, value in list(self._index.doomed.items(transaction)):
            number, size = records.key_place(key)[0], records.unpack_number(key, value)
            segment = accounts.get(number)
            if segment is None:
                self._index.doomed.pop(transaction, key)
            else:
                accounts[number] = segment._replace(doomed=segment.doomed + size)

    def _doom(self, transaction: lmdb.Transaction, keys: Iterable[bytes], before: float = math.inf) -> Doomed:
        doomed = {}
        for key in keys:
            value = self._index.entries.get(transaction, key)
            if value is None:
                continue
            entry = records.unpack_entry(key, value)
            if entry.used_at >= before:
                continue
            self._index.entries.pop(transaction, key)
            place, size = (entry.segment, entry.offset), allotted(entry.length, self._block)
            doomed[place] = size
            self._index.doomed.put(transaction, place_key(place), records.pack_number(place_key(place), size))
            segment = self._get(transaction, entry.segment)
            new = segment._replace(live=segment.live - size, doomed=segment.doomed + size)
            self._put(transaction, entry.segment, new)
        return doomed

    def _strike_off(self, transaction: lmdb.Transaction, place: Place) -> None:
        value = self._index.doomed.pop(transaction, place_key(place))
        if value is not None:  # else another process has freed it too
            size = records.unpack_number(place_key(place), value)
            segment = self._get(transaction, place[0])
            self._put(transaction, place[0], segment._replace(doomed=segment.doomed - size))
            self._charge(transaction, -size)

    def _close(self, transaction: lmdb.Transaction, number: int, segment: Segment) -> None:
        self._charge(transaction, -(segment.top - segment.end + segment.live + segment.doomed))
        self._index.segments.pop(transaction, segment_key(number))
        items = self._index.doomed.items(transaction, segment_key(number))
        for key in list(takewhile(lambda key: key.startswith(segment_key(number)), (key for key, _ in items))):
            self._index.doomed.pop(transaction, key)

    def _accounts(self, transaction: lmdb.Transaction) -> dict[int, Segment]:
        found = self._index.segments.items(transaction)
        return {int.from_bytes(key, "big"): records.unpack_segment(key, value) for key, value in found}

    def _account(self, transaction: lmdb.Transaction, number: int) -> Segment | None:
        value = self._index.segments.get(transaction, segment_key(number))
        return None if value is None else records.unpack_segment(segment_key(number), value)

    def _get(self, transaction: lmdb.Transaction, number: int) -> Segment:
        found = self._account(transaction, number)
        if found is None:
            raise DamagedIndexError(f"there is no account of segment {number}")
        return found

    def _put(self, transaction: lmdb.Transaction, number: int, segment: Segment) -> None:
        key = segment_key(number)
        self._index.segments.put(transaction, key, records.pack_segment(key, segment))

    def _charge(self, transaction: lmdb.Transaction, more: int) -> None:
        self._set_total(transaction, _CHARGED, self._total(transaction, _CHARGED) + more)

    def _total(self, transaction: lmdb.Transaction, name: bytes) -> int:
        value = self._index.totals.get(transaction, name)
        return 0 if value is None else records.unpack_number(name, value)

    def _set_total(self, transaction: lmdb.Transaction, name: bytes, number: int) -> None:
        self._index.totals.put(transaction, name, records.pack_number(name, number))
