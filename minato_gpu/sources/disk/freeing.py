"""Giving space back to the disk: what no entry needs any more, and what processes that were killed have left."""

from __future__ import annotations

from minato_gpu.sources.disk.files import SegmentFiles
from minato_gpu.sources.disk.filesystem import punch_hole
from minato_gpu.sources.disk.ledger import Doomed, Ledger
from minato_gpu.sources.disk.records import Place


def free(ledger: Ledger, files: SegmentFiles, doomed: Doomed) -> bool:
    """Make doomed space free: segments that nothing is in are deleted, others get holes.

    Where the disk knows no holes, space is free, and charged no longer, once all of its segment is doomed: then this
    returns False. Raises OSError, lmdb.Error and DamagedIndexError; what is not free then stays doomed.
    """
    if not doomed:
        return True
    freed = {number: 0 for number, _ in doomed}
    accounts = ledger.accounts(freed)  # of very many, once most of what is in segments has gone
    whole = {segment.number for segment in accounts if segment.is_over}
    gives_back = True
    for place, size in doomed.items():
        if place[0] not in whole:
            is_free = _freed(files, place, size)
            freed[place[0]] += size * is_free
            gives_back &= is_free
    ledger.settle(freed, files.delete)
    return gives_back


def recover(ledger: Ledger, files: SegmentFiles) -> None:
    """What must be done where processes may have been killed, while no other is there. Raises as ``free`` does."""
    doomed = ledger.reconcile(files.numbers(), files.delete)
    for segment in ledger.accounts():
        file = None if segment.full else files.take(segment.number)
        if file is not None:
            ledger.resume(segment.number, file.cut)
    free(ledger, files, doomed)
    ledger.settle({segment.number: 0 for segment in ledger.accounts() if segment.is_over}, files.delete)


def _freed(files: SegmentFiles, place: Place, size: int) -> bool:
    try:
        file = files.opened(place[0])  # held over the call: another thread may make ``files`` forget it just now
    except FileNotFoundError:  # with the whole file
        return True
    return punch_hole(file.fd, place[1], size)
