"""Samples on their way into the window: what lanes have made of them, and what was read for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minato_gpu.lanes.base import Extra, Failure, Handed, Item, Source, Unshippable
from minato_gpu.lanes.store import Store
from minato_gpu.samples import TicketId
from minato_gpu.scheduling.messages import TicketSpan, count, tickets
from minato_gpu.window.host_memory import HostMemoryAccount, lying
from minato_gpu.window.records import Window
from minato_gpu.window.stacking import Stacking


class Samples:
    """The samples of the tickets in the window. ``unshippable``: one could not be pickled, so that jobs prepare their
    samples themselves."""

    def __init__(self, window: Window, holdings: HostMemoryAccount, stacking: Stacking, store: Store) -> None:
        self.unshippable = False
        self._window = window
        self._holdings = holdings
        self._stacking = stacking
        self._store = store
        self._inspects = False  # there are host reads

    def path(self, serial: TicketId) -> str | None:
        """The source path of a ticket, where its host read has told it."""
        source = lying(self._window.at(serial).sources.get(serial))
        if source is None or isinstance(source, Failure):
            return None
        fields = self._store.get(source)
        return str(fields["path"]) if "path" in fields else None

    def arrived(
        self, spans: Iterable[TicketSpan], items: Sequence[Item] | None, nbytes: int
    ) -> tuple[int, tuple[int, ...]]:
        """Samples are ready, in this order; returns their bytes and the offsets of those that failed.

        Those that are handed over instead stay with what they have come to, see ``handed``; their bytes do not count.
        """
        failed: list[int] = []
        rows = count(spans)
        pairs = () if items is None else zip(tickets(spans), items, strict=True)
        for offset, (serial, item) in enumerate(pairs):
            if isinstance(item, Handed):
                rows -= 1
                nbytes -= item.nbytes
            elif item is not None:
                rows -= not isinstance(item, Extra)
                self._window.at(serial).items[serial] = item
                if isinstance(item, Failure):
                    failed.append(offset)
                self.unshippable = self.unshippable or isinstance(item, Unshippable)
        nbytes += rows * self._stacking.row_bytes
        self._holdings.count(nbytes)
        return nbytes, tuple(failed)

    def handed(self, spans: Iterable[TicketSpan], items: list[Item] | None) -> tuple[tuple[int, int], ...]:
        """What was read for these tickets has been used; returns offset and stage of those that another lane goes on
        with, from what an earlier one has left."""
        if items is None or not any(isinstance(item, Handed) for item in items):
            self.used(spans)
            return ()
        found: list[tuple[int, int]] = []
        for offset, (serial, item) in enumerate(zip(tickets(spans), items, strict=True)):
            self.used(((serial, TicketId(serial + 1)),))
            if isinstance(item, Handed):
                found.append((offset, item.stage))
                self._window.at(serial).sources[serial] = item
        return tuple(found)

    def inspected(self, serial: TicketId, item: Source) -> None:
        """The host read of a ticket has left ``item`` (a reference to its fields, or a Failure)."""
        self._inspects = True
        self._window.at(serial).sources[serial] = item

    def used(self, spans: Iterable[TicketSpan]) -> None:
        """The host reads of these tickets are no longer needed."""
        if not self._inspects:
            return
        for serial in tickets(spans):
            source = self._window.at(serial).sources.pop(serial, None)
            if source is not None:
                self._holdings.release(source)
