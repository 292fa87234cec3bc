"""Tasks out, reports back: plain tuples of plain data. All other commands and messages of lanes are in contract.py.

A lane takes ``Task``s (one per chunk that the scheduler dispatches) and answers with ``Report``s. Where a prepared
sample is stored, or what came of it, is an ``Item``: None for a row of its place's slab, or one of the small classes
below.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch._utils import ExceptionWrapper

from minato_gpu.samples import Key, Origin, Position, Value, add_note
from minato_gpu.sources.reading import Place

Part = tuple[int, tuple[float, ...]]
"""The first stage that a lane has run of a sample, and the seconds of each part from there on, between split points."""


class NoSample:
    """The key of the only ticket of a batch for which the sampler yielded no keys at all."""

    def __repr__(self) -> str:
        return "no key"


class Piece(NamedTuple):
    """Neighbouring tickets of one place: ``position`` to ``position + len(keys)`` of the epoch.

    ``slab`` is the offset of the place's slab in the engine's arena (-1: none) that has ``rows`` rows; the first
    ticket goes to row ``row``. ``joins``: these are all tickets of a batch whose composition is settled: the worker
    prepares those that are missing, and collates the batch. ``stored``: for each ticket where its prepared sample is
    stored (None: it is missing); None where all are missing. ``occurrences`` are None when all are 0. ``sources``: for
    each ticket its host read, or its fields from a split point (None: it has none); None where none has any.
    ``positions``: those of all tickets where they are not neighbours (a replayed order), else None.
    ``marks``: the first ticket's mark, and those of the others follow (see memory/completions.py); -1: not given yet.
    ``fetched``: for each ticket where its bytes that were read ahead are stored; None if nothing is read ahead.
    """

    position: Position
    keys: list[Key]
    occurrences: list[int] | None
    slab: int = -1
    rows: int = 0
    row: int = 0
    joins: bool = False
    sources: list[HostRead | None] | None = None
    positions: Sequence[Position] | None = None
    marks: int = -1
    fetched: list[tuple[Place, ...]] | None = None
    stored: list[StoredSample] | None = None

    def position_of(self, at: int) -> Position:
        """Returns the position of ticket ``at`` of the piece."""
        return Position(self.position + at) if self.positions is None else self.positions[at]

    def only(self, offsets: Iterable[int]) -> Piece:
        """Returns a piece of one or more of its tickets, by offset, with nothing but their keys and positions."""
        offsets = [*offsets]
        positions = [self.position_of(at) for at in offsets]
        return Piece(positions[0], [self.keys[at] for at in offsets], None, positions=positions)

    def elsewhere(self) -> Piece:
        """Returns the piece without what is in this host's memory: its slab, marks, host reads, bytes that were read.

        ``rows`` says for how many of its samples there are rows here: all or none.
        """
        rows = len(self.keys) if self.slab >= 0 else 0
        return self._replace(slab=-1, rows=rows, row=0, sources=None, marks=-1, fetched=None)


class Task(NamedTuple):
    """One chunk. ``run`` tells loader runs apart, ``seed`` is the epoch's base seed.

    ``layout``: a pickled Layout; empty: not known yet; None: samples are not rows.
    ``kind``: run (prepare samples), inspect (host reads only), collate (the one piece, of a batch that is composed, is
    joined) or next (the next batches of the worker's own stream; a stream's first task has its ``start``).
    ``shared_seed``: of a data pipe's order in this epoch, for workers that have begun an earlier one; else None.
    ``stop``: the stage before which samples are to be handed over (-1: none).
    ``singly``: ask the data set for one sample at a time, and report each by itself; a worker died at several at once.
    ``credit``: once its samples come to so many bytes that are in no rows, a worker begins no other (0: no limit).
    ``ended``, where there is a credit: by worker of the lane, the last chunk known to have ended when this one was
    dispatched. If the worker has ended another chunk since, what it prepared beyond that one's credit is taken off this
    one's.
    """

    run: int
    chunk: int
    kind: str
    epoch: int
    seed: int
    pieces: tuple[Piece, ...] = ()
    layout: bytes | None = None
    start: Any = None  # lanes.streams.StreamState: that file imports this one
    stop: int = -1
    singly: bool = False
    shared_seed: int | None = None
    credit: int = 0
    ended: dict[int, int] | None = None

    def find(self, number: int) -> tuple[Piece, int]:
        """Returns the piece that ticket ``number`` of the task is in, and its offset there."""
        for piece in self.pieces:
            if number < len(piece.keys):
                return piece, number
            number -= len(piece.keys)
        raise IndexError(number)

    def elsewhere(self) -> Task:
        """Returns the task for a lane that does not share this host's memory."""
        return self._replace(pieces=tuple(piece.elsewhere() for piece in self.pieces))


class Report(NamedTuple):
    """A report that samples of a chunk, from ``first`` to before ``done``, are ready, have failed or are handed over.

    ``final``: the worker is through with the chunk. ``items``: None when all samples are plain rows, else one for each.
    ``times``: the seconds that each sample cost without its waits for a core (None: all were cheap, or it is not
    known). ``own_s``: their sum (None: not known); ``seconds`` includes the waits.
    ``begin`` and ``end`` are times of ``perf_counter``; ``ends``: of each sample, where known.
    ``layout``, ``prepared``, ``parts``: see ``TicketOutcome``; the parts of all samples, or None.
    ``repeated``: samples that a device has run again.
    """

    run: int
    chunk: int
    worker: int
    first: int
    done: int
    seconds: float
    begin: float
    end: float
    final: bool
    items: list[Item] | None = None
    times: list[float] | None = None
    ends: list[float] | None = None
    layout: bytes | None = None
    prepared: int = 0
    repeated: int = 0
    parts: list[Part | None] | None = None
    own_s: float | None = None


class TicketOutcome(NamedTuple):
    """The report of one ticket: where its sample is stored, and what else is known of it.

    ``part``: of a pipeline with split points, what the parts of the sample took. ``layout``: that of the first sample
    that the worker prepared without one. ``prepared``: of a batch that is composed, how many samples the worker that
    joins it has prepared.
    """

    item: Item
    part: Part | None = None
    layout: bytes | None = None
    prepared: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A sample in row ``row`` of a slab with ``rows`` rows; ``objects`` are its strings and bytes."""

    slab: int
    rows: int
    row: int
    layout: bytes
    objects: list[Value] | None = None


@dataclass(frozen=True, slots=True)
class Extra:
    """A sample in its own row, with object leaves that travel beside the slab."""

    objects: list[Value]
    nbytes: ClassVar[int] = 0  # beside those of its row


@dataclass(frozen=True, slots=True)
class Resident(Extra):
    """A sample in its own row, some leaves of which are on the device instead.

    ``leaves``: tensors by the number of their leaf. ``made``: the micro-batch that they belong to; it is freed
    after them (see ``DeviceRow``).
    """

    leaves: Mapping[int, torch.Tensor] = field(default_factory=dict)
    made: Any = None


@dataclass(frozen=True, slots=True)
class Blob:
    """An object in the arena of ``worker`` (-1: the engine's). ``collated``: it is a finished batch, not a sample.

    ``blocks``: where it is stored, each an offset and a size in bytes. The first holds the pickle, the others parts.
    """

    worker: int
    blocks: tuple[tuple[int, int], ...]
    collated: bool = False

    def __reduce__(self) -> tuple[object, ...]:  # a third of the time of a dataclass's own
        return Blob, (self.worker, self.blocks, self.collated)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        if len(self.blocks) == 1:
            return self.blocks[0][1]
        return sum(nbytes for _, nbytes in self.blocks)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Owner and offset of every block."""
        return [(self.worker, offset) for offset, _ in self.blocks]


@dataclass(frozen=True, slots=True)
class Local:
    """An object of this very process, made by a worker thread or a device lane: it is stored as it is."""

    value: Value
    nbytes: int
    collated: bool = False


@dataclass(frozen=True, slots=True)
class Yielded:
    """The next batch of a worker's own stream (None: the stream has ended), and the stream's state after it."""

    item: Stored | Failure | None
    state: Any  # lanes.streams.StreamState, None: not reported; that file imports this one

    @property
    def nbytes(self) -> int:
        """Bytes of the batch."""
        return 0 if self.item is None else self.item.nbytes


@dataclass(frozen=True, slots=True)
class _Fields:
    """A sample that another lane, or a later task, continues: where its fields are stored."""

    fields: Stored

    @property
    def nbytes(self) -> int:
        """Bytes of the fields."""
        return self.fields.nbytes


@dataclass(frozen=True, slots=True)
class Features(_Fields):
    """A sample's host read: where its fields are stored, and its cost features. A failed one is a ``Failure``."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Handed(_Fields):
    """A sample whose stages before ``stage`` are done, and where the fields that the others need are stored."""

    stage: int

    def __reduce__(self) -> tuple[object, ...]:  # see Blob
        return Handed, (self.fields, self.stage)


@dataclass(frozen=True, slots=True)
class Failure:
    """The error, with its traceback, of a sample or (with ``collated``) of its whole batch.

    ``name``: the type of what went wrong, where ``error`` can only be raised as another.
    """

    error: ExceptionWrapper
    collated: bool = False
    origin: Origin | None = None
    name: str = ""
    nbytes: ClassVar[int] = 0

    def __reduce__(self) -> tuple[object, ...]:
        plain, kind = copy.copy(self.error), self.error.exc_type
        plain.exc_type = RuntimeError
        rest = self.collated, self.origin, self.name or kind.__name__
        return _loaded, (plain, pickle.dumps(kind), kind.__qualname__, *rest)


Stored = Blob | Local
"""The place where an object is stored."""
Draws = Mapping[int, Mapping[str, Value]]
"""The drawn parameters of a sample, by number of the stage and by name."""
Begun = tuple[dict[str, Value], Draws | None]
"""The stored part of a sample that another lane continues: its fields, checked, and what was drawn for all stages that
follow; None where nothing was (that lane draws, and meets the error that there may be)."""
Item = Extra | Blob | Local | Yielded | Features | Handed | Failure | None
"""The place of a prepared sample or batch, or its failure. None: in its row, with nothing beside it.

Where there are no rows, None is nowhere: the sample is in its batch already, or it cannot be sent, and the worker that
joins the batch prepares it."""
StoredSample = Row | Blob | Local | None
"""The place of a prepared sample, for the worker that joins it with others; None: it is not stored."""
HostRead = Stored | Handed | Failure
"""A sample's stored input from an earlier step: its host read, or the fields that another lane has made of that."""


def stored_part(item: Item) -> Item:
    """Returns where the batch of a stream, or the fields of a host read or a handed-over sample, are stored; any other
    item as it is."""
    if isinstance(item, Yielded):
        return item.item
    return item.fields if isinstance(item, _Fields) else item


def _loaded(error: ExceptionWrapper, kind: bytes, name: str, *rest: Any) -> Failure:
    """Returns a failure from another process, which may know classes that this one cannot import."""
    try:
        error.exc_type = pickle.loads(kind)
    except Exception:
        error.exc_msg = f"{name}, whose class cannot be loaded here. {error.exc_msg}"
    return Failure(error, *rest)


def reraise(error: ExceptionWrapper) -> NoReturn:
    """Raises an error that a worker caught, as PyTorch does: of its class, with the original traceback as its text.

    A class that cannot be made from text (an ``ExceptionGroup``, say) becomes a RuntimeError with that text; an error
    that hides the text gets it as a note.
    """
    try:
        error.reraise()
    except BaseException as made:
        found = made
    text = f"Caught {error.exc_type.__name__} {error.where}.\nOriginal {error.exc_msg}"
    if not isinstance(found, error.exc_type):
        found = RuntimeError(text)
    elif not _shows(found, text):
        add_note(found, text)
    try:
        raise found.with_traceback(None) from None
    finally:
        del found  # its traceback knows this frame


def _shows(error: BaseException, text: str) -> bool:
    try:
        return text in str(error)
    except Exception:  # of a class whose ``__str__`` needs what its constructor was not given
        return False


def failure(
    error: BaseException, where: str, *, collated: bool = False, origin: Origin | None = None, name: str = ""
) -> Failure:
    """Returns an error of a sample or a batch, made ready to be raised again in the training process.

    An exception of a class that cannot be pickled (one defined in a function, say), or not be loaded there, becomes a
    RuntimeError. ``name``: the type name to report, if not that of ``error``.
    """
    wrapper = ExceptionWrapper((type(error), error, error.__traceback__), where)
    try:
        pickle.dumps(type(error))
    except Exception:
        wrapper.exc_msg = f"{type(error).__qualname__}, whose class cannot be pickled. {wrapper.exc_msg}"
        wrapper.exc_type = RuntimeError
    return Failure(wrapper, collated, origin, name or type(error).__name__)
