"""Reports that cannot be sent: what is to blame becomes a failure of stage "send", the rest is reported as it is.

Text and bytes of a sample travel in the report itself, which can be more than the worker has memory for.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from minato_gpu.lanes.base import Failure, Item, Joined, Report, Task, Yielded, failure
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.wire import Channel
from minato_gpu.samples import Origin


def send(channel: Channel, report: Report, task: Task, store: Store, who: str) -> None:
    """Send the report of a task, with failures in the place of what cannot be sent. Raises where that does not help."""
    error = _tried(channel, report)
    if error is None:
        return
    if task.kind in ("run", "next") and report.done - report.first > 1:
        for single in _one_by_one(report):
            send(channel, single, task, store, who)
        return
    items = list(report.items or ())
    for number, item in enumerate(items):
        if item is not None:
            store.discard(item.item if isinstance(item, (Joined, Yielded)) else getattr(item, "fields", item))
            failed = _failure(task, report.first + number, item, error, who)
            items[number] = Yielded(failed, item.state) if isinstance(item, Yielded) and item.item else failed
    again = _tried(channel, report._replace(items=items or None, nbytes=0))
    if again is not None:
        raise again


def _tried(channel: Channel, report: Report) -> Exception | None:
    try:
        channel.send(report)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # they hold what was to be sent, which may be most of the memory
        return error
    return None


def _one_by_one(report: Report) -> Iterator[Report]:
    """The same, each sample in a report of its own."""
    count = report.done - report.first
    for number in range(count):
        first, only = report.first + number, slice(number, number + 1)
        item = None if report.items is None else report.items[number]
        yield report._replace(
            first=first,
            done=first + 1,
            seconds=report.seconds / count,
            final=report.final and number == count - 1,
            nbytes=0 if item is None else item.nbytes,
            items=None if item is None else [item],
            times=None if report.times is None else report.times[only],
            parts=None if report.parts is None else report.parts[only],
            layout=None if number else report.layout,
        )


def _failure(task: Task, offset: int, item: Item, error: Exception, who: str) -> Failure:
    collated = bool(getattr(item, "collated", False)) or task.kind in ("collate", "next")
    origin = Origin(task.epoch, stage="send", lane="cpu")
    for piece in () if collated else task.pieces:
        if offset < len(piece.keys):
            origin = Origin(task.epoch, piece.position_of(offset), piece.keys[offset], stage="send", lane="cpu")
            break
        offset -= len(piece.keys)
    return failure(error, f"{who} ({origin})", collated=collated, origin=origin)
