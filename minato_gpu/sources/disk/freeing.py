"""Giving space back to the disk: what no entry needs any more, and what processes that were killed have left."""

from __future__ import annotations

from collections.abc import Iterable

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
    touched = {number for number, _ in doomed}
    accounts = ledger.accounts_of(touched)  # of very many, once most of what is in segments has gone
    whole = {number for number, segment in accounts.items() if segment.full and not segment.live}
    freed = [place for place, size in doomed.items() if place[0] not in whole and _freed(files, place, size)]
    ledger.settle(freed, touched, files.delete)
    return len(freed) == sum(number not in whole for number, _ in doomed)


def recover(ledger: Ledger, files: SegmentFiles) -> None:
    """What must be done where processes may have been killed, while no other is there. Raises as ``free`` does."""
    ledger.reconcile(files.numbers(), files.delete)
    for number, segment in ledger.accounts().items():
        file = None if segment.full else files.take(number)
        if file is not None:
            ledger.resume(number, file.cut)
    free(ledger, files, ledger.doomed())
    empty: Iterable[int] = [
        number for number, segment in ledger.accounts().items() if segment.full and not segment.live
    ]
    ledger.settle((), empty, files.delete)


def _freed(files: SegmentFiles, place: Place, size: int) -> bool:
    try:
        return punch_hole(files.opened(place[0]).fd, place[1], size)
    except FileNotFoundError:  # with the whole file
        return True
