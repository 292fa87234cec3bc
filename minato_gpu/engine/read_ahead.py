"""Keeps account of samples whose bytes have arrived: between the sampler's order, the reader process and the scheduler.

A place is wanted as soon as it is drawn, which is before it enters the window. What is fetched by then is
announced to the scheduler as the place is admitted; the rest, whenever it comes. A sample's bytes are released once it
is prepared.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from operator import index
from typing import Any, cast

from minato_gpu.lanes.base import Piece
from minato_gpu.samples import Key as SampleKey
from minato_gpu.samples import TicketId, sample_seed
from minato_gpu.sampling.epoch_batches import EpochBatches
from minato_gpu.sampling.lookahead import LookAhead
from minato_gpu.scheduling.spans import TicketSpan, joined, singles, tickets
from minato_gpu.sources.reader import Outbox, Reader
from minato_gpu.sources.reading import Place
from minato_gpu.sources.sent_samples import is_copy
from minato_gpu.sources.source import Key, Source, SourceOf, prepared_key
from minato_gpu.util.messages import LOGGER
from minato_gpu.window.records import Record

_TIERS = ("memory", "disk")
_ELSEWHERE = (*_TIERS, "share")  # counts that stats() tells under another name


class ReadAhead:
    """Reads ahead for the tickets of one run at a time."""

    def __init__(self, reader: Reader, source_of: SourceOf, look_ahead: LookAhead | None) -> None:
        self.reader = reader  # lent by the loader
        self._source_of = source_of  # what the data set declares of a key
        self._look_ahead = look_ahead  # says what is known of epochs to come, as one begins
        self._counts = reader.counts  # counts of the present workers
        self._lost = False
        self._shares = reader.prepared is not None  # prepared samples are shared, too
        self._seeds: dict[int, int] = {}  # base seeds by epoch, if samples are shared
        self._waits: set[TicketId] = set()  # serials whose bytes have been asked for
        self._here: dict[TicketId, tuple[Place, ...]] = {}
        self.copies: set[TicketId] = set()  # of those, serials whose sample another loader has prepared
        self._outbox = Outbox()
        self._admitted = 0  # serials below this one have been admitted
        self._missing = 0  # admitted serials whose bytes have not arrived
        self._is_wrong = False  # what ``source`` returned was of no use, which was logged

    def new_run(self) -> None:
        """Cancels all that was wanted."""
        self.reader.new_run()
        self._waits, self._here, self._admitted, self._missing = set(), {}, 0, 0
        self.copies.clear()
        self._outbox = Outbox()

    @property
    def pending(self) -> bool:
        """True if bytes have been asked for and have not arrived."""
        return bool(self._waits)

    @property
    def fd(self) -> int:
        """The descriptor that is readable when there may be something to ``receive``."""
        return self.reader.end.fileno()

    # --- tickets ---------------------------------------------------------------------------------------------

    def begin(self, source: EpochBatches, *, early: bool) -> None:
        """Begins an epoch: the tickets wanted from now on are its own. ``early``: it is drawn before it begins."""
        if self._shares:
            self._seeds[source.number] = source.seed
        if self._look_ahead is not None and not self._lost:
            self.reader.send(self._outbox)
            self.reader.begin(self._look_ahead(source, early=early))

    def want(self, record: Record, spans: Iterable[tuple[int, int]]) -> None:
        """Asks for the bytes of tickets of a place that has been drawn; ``spans``: their numbers in it."""
        wanted = [self._wanted(record, at) for lo, hi in spans for at in range(lo, hi)]
        serials = [serial for serial, _, _ in wanted]
        if self._lost:
            self._here.update(dict.fromkeys(serials, ()))
            return
        self._waits.update(serials)
        self._outbox.want(record.first, wanted)
        self.say()

    def _wanted(self, record: Record, at: int) -> tuple[TicketId, int, tuple[Key, ...]]:
        """Returns a ticket of the place, the index of its sample (-1: none), and the keys of what it needs.

        A prepared sample's key among loaders is a number of 63 bits from its seed, key and occurrence.
        """
        key, sample = record.keys[at], -1
        with suppress(TypeError):
            sample = index(key)
        keys = self._keys(key)
        if self._shares:
            occurrence = 0 if record.occurrences is None else record.occurrences[at]
            with suppress(Exception):  # the key has no digest
                keys += (prepared_key(sample_seed(self._seeds[record.epoch], 0, key, occurrence) >> 1),)
        return TicketId(record.first + at), sample, keys

    def _keys(self, key: SampleKey) -> tuple[Key, ...]:
        try:
            found = self._source_of(key)
            sources = (found,) if isinstance(found, Source) else tuple(found)
            return tuple(source.key for source in sources)
        except Exception as error:
            if not self._is_wrong:
                self._is_wrong = True
                LOGGER.warning(
                    "The data set's source(%r) raised %s or returned no Source: what it stands for is not read ahead, "
                    "but by the worker that prepares the sample. (Said once.)",
                    key,
                    repr(error),  # whoever keeps the record is not to keep the frames, and the loader with them
                )
            return ()

    def admit(self, record: Record) -> list[TicketSpan]:
        """Notes that a place enters the window; returns which of its tickets have their bytes."""
        end = record.first + record.rows
        self._admitted = end
        here = [serial for serial in map(TicketId, range(record.first, end)) if serial in self._here]
        if len(here) < record.rows:
            self._missing += sum(serial in self._waits for serial in range(record.first, end))
            self.say()
        if self._shares and not self._lost:
            self.reader.admit(end)
        return joined(singles(here))

    def receive(self) -> tuple[list[TicketSpan], list[TicketSpan]] | None:
        """Returns the admitted tickets whose bytes have arrived since the last call, as spans that may reach over
        places: those to be prepared, and those to be copied from another loader. None if there are none."""
        told = None if self._lost else self.reader.receive()
        if told is None and not self._lost:
            self._lost = True
            self.reader.silence()
            self.reader.say_lost()
            told = [(serial, ()) for serial in self._waits]
        if not told:
            return None
        fetched = cast("dict[TicketId, tuple[Place, ...]]", dict(told))
        self._waits.difference_update(fetched)
        self._here.update(fetched)
        if self._shares:
            self.copies.update(serial for serial, places in fetched.items() if is_copy(places))
        if not self._missing:
            return None
        awaited = sorted(serial for serial in fetched if serial < self._admitted)
        self._missing -= len(awaited)
        copies = [serial for serial in awaited if serial in self.copies]
        others = [serial for serial in awaited if serial not in self.copies] if copies else awaited
        return joined(singles(others)), joined(singles(copies))

    def put_at_hand(
        self, pieces: Iterable[Piece], parts: Iterable[tuple[Record, TicketId, TicketId]]
    ) -> tuple[Piece, ...]:
        """Returns the pieces of a task with the places of their samples' bytes; ``parts`` has their tickets."""
        here = self._here
        return tuple(
            piece._replace(fetched=[here.get(TicketId(serial), ()) for serial in range(lo, hi)])
            for piece, (_, lo, hi) in zip(pieces, parts, strict=True)
        )

    def release(self, spans: Iterable[TicketSpan]) -> None:
        """Releases the bytes of samples that are prepared."""
        for serial in tickets(spans):
            places = self._here.pop(serial, None)
            if places is not None:
                self.copies.discard(serial)
                self._outbox.release(serial, places)

    def say(self) -> None:
        """Sends the reader process what is wanted and released, if it is time. To be called before any wait."""
        if self._outbox.is_due(self._admitted, self._missing):
            if self._lost:
                self._outbox = Outbox()
            else:
                self.reader.send(self._outbox)

    # --- what is said of it ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Returns the entries of ``stats()`` on what is read, kept and shared; those that are empty are left out."""
        counts = self._counts
        reads = {name: value for name, value in counts.items() if name not in _ELSEWHERE}
        found = {
            "reads": {"process": "lost" if self._lost else "runs", **reads},
            "cache": {name: counts[name] for name in _TIERS if name in counts},
            "share": counts.get("share"),
        }
        return {name: each for name, each in found.items() if each}
