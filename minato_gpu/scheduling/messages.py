"""The scheduler's events and instructions.

All are small frozen picklable dataclasses, so that a lane can live in another thread, process or machine, and the same
events lead to the same instructions. Times are seconds of any monotonic clock; the scheduler never
reads one.

Words: a *ticket* is one occurrence of a key of the sampler, for which a sample is prepared. A *slot* is a worker of a
lane. A *chunk* is a dispatch; a *lease* is a chunk of neighbouring tickets for a CPU worker, and its *credit* the bytes
that this worker may prepare of it. The *window* holds the tickets that are admitted and not delivered.

Numbers, each with a type in ``samples.py`` so that mypy tells them apart:

- serial (``TicketId``): a ticket, counted through the run.
- place (``SourceBatch``): a batch of the sampler, counted through the run; place k holds the tickets of the k-th.
- order (``OutputBatch``): a delivered batch, counted through the run (``Compose.order``, ``Load.order``).
- position (``Position``): a ticket, counted through its epoch.
- number (``Batch.number``): a delivered batch, counted through its epoch: its order less the epoch's first. Batch k of
  an epoch lives on device k modulo the number of devices.

An epoch's serials, places and orders are each contiguous, and its first place and first order are the same number
(``Epoch.first_order``, ``Record.begins``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minato_gpu.samples import OutputBatch, SourceBatch, TicketId
from minato_gpu.scheduling.plans import Plan
from minato_gpu.scheduling.spans import Span, TicketSpan, count

NO_BATCH = OutputBatch(-1)
CPU, DEVICE = "cpu", "device"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tickets that are sent to a lane together, in this order."""

    number: int
    lane: str
    # "run": prepare the samples; "inspect": host read only, reports cost features; "collate": join the prepared
    # samples of batch ``order``; "next": the next batches of the stream of ``worker``
    kind: str
    spans: tuple[TicketSpan, ...]
    seconds: float  # predicted
    order: OutputBatch = NO_BATCH
    stop: int = -1  # stage before which the lane hands the samples back for another lane; -1: none
    credit: int = 0  # bytes of prepared samples after which the lane returns the rest; 0: no limit
    worker: int = -1  # worker of the lane that is to take it; -1: any

    @property
    def size(self) -> int:
        """Number of samples."""
        if len(self.spans) == 1:
            return self.spans[0][1] - self.spans[0][0]
        return count(self.spans)


# --- events -----------------------------------------------------------------------------------------------


class LaneCosts(NamedTuple):
    """Measured costs of the samples that a lane has prepared."""

    samples: int
    mean: float  # seconds per sample
    variance: float  # seconds squared
    speed: float = 1.0  # speed of its slots, as a multiple of this host's
    lease_s: float = 0.0  # seconds of a lease beside its samples


@dataclass(frozen=True, slots=True)
class LaneOpened:
    """Event: ``slots`` more workers of a lane are ready; a negative number were lost. The other fields count at the
    first opening."""

    time: float
    lane: str
    slots: int
    kind: str = CPU  # CPU or DEVICE: whose costs apply
    known: LaneCosts | None = None  # measured in an earlier run
    on_host: bool = True  # on this host: can read for other lanes and collate batches


@dataclass(frozen=True, slots=True)
class Admitted:
    """Event: the sampler's next batch has entered the window: serials ``first`` to ``first + size``."""

    time: float
    place: SourceBatch
    epoch: int
    first: TicketId
    size: int
    cpu: Sequence[float] | None = None  # predicted seconds of each sample on a CPU slot; nan: unknown; None: all are
    device: Sequence[float] | None = None  # the same on a device slot; None: there is no device lane
    last: bool = False  # the epoch's last batch
    batch: int | None = None  # size of the batch of this number after a resume; 0: none; None: the place's
    between: Sequence[Sequence[Plan]] | None = None  # for each sample the plans that begin on the CPU
    home: str = DEVICE  # device side that may prepare them, one of ``Policy.homes``
    fetched: Sequence[TicketSpan] | None = None  # already read ahead, others come by ``Fetched``; None: no read-ahead
    follow: int | None = None  # samples of the epoch after these by the sampler's length, which may be wrong


@dataclass(frozen=True, slots=True)
class Fetched:
    """Event: the bytes of these admitted serials have arrived; each span is in one place and comes once.

    Of the serials ``copies`` another loader has prepared the sample, which a worker has but to copy.
    """

    time: float
    spans: Sequence[TicketSpan]
    copies: Sequence[TicketSpan] = ()


@dataclass(frozen=True, slots=True)
class Resumed:
    """Event: an earlier run delivered the batches before ``order``. Comes before the first ``Admitted`` or
    ``LaneOpened``."""

    time: float
    order: OutputBatch
    turn: int = 0  # the worker that delivers next, of workers with streams of their own
    ended: tuple[int, ...] = ()  # workers whose streams have nothing left


@dataclass(frozen=True, slots=True)
class Ended:
    """Event: the sampler of ``epoch`` has no further batch; sent where the last ``Admitted`` could not know it."""

    time: float
    epoch: int


@dataclass(frozen=True, slots=True)
class Inspected:
    """Event: an inspect chunk has ended. Carries predictions (see ``Admitted``) for each of its serials, in order."""

    time: float
    chunk: int
    cpu: Sequence[float]
    device: Sequence[float] | None
    nbytes: int = 0  # held by the results of the host reads
    between: Sequence[Sequence[Plan]] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: the first ``done`` samples of a chunk are ready or handed over (cumulative); the other fields describe
    those that are new.

    A final report with ``done`` below the chunk's size returns the rest: they were revoked before they started.
    """

    time: float
    chunk: int
    done: int
    seconds: float  # of the new samples, added up
    nbytes: int = 0  # of the new samples that are ready
    final: bool = True  # the lane has ended the chunk
    failed: tuple[int, ...] = ()  # offsets in the chunk that raised an error
    handed: tuple[tuple[int, int], ...] = ()  # offsets that were handed over, each with the stage it has reached
    handed_bytes: int = 0  # held by the samples handed over until they are ready
    ended: int = 0  # tickets, the last ones, that found their worker's stream at its end, and hold nothing
    own_s: float | None = None  # ``seconds`` without waits for a core; None: the same


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: a worker of the lane has died, and a slot with it; a replacement comes as ``LaneOpened``.

    Unreported samples of its chunk wait again, except the offsets ``settled``: these are given up, and count as ready.
    """

    time: float
    lane: str
    chunk: int | None = None  # None: the worker had none
    settled: Span = (0, 0)  # offsets that are given up
    failed: tuple[int, ...] = ()  # of those, offsets that count as errors; at least one
    nbytes: int = 0  # held by those


@dataclass(frozen=True, slots=True)
class Running:
    """Event: progress of an unfinished chunk. ``done`` samples are finished, reported or not."""

    time: float
    chunk: int
    done: int
    since_s: float  # seconds since the next sample started


@dataclass(frozen=True, slots=True)
class Revoked:
    """Event: the lane will start no sample of the chunk from offset ``keep`` on; these wait again."""

    time: float
    chunk: int
    keep: int
    nbytes: int = 0  # held by ready samples before ``keep``, reported or not


@dataclass(frozen=True, slots=True)
class CollateNeeded:
    """Event: the composed batch ``order`` must be collated on the CPU lane."""

    time: float
    order: OutputBatch


@dataclass(frozen=True, slots=True)
class Asked:
    """Event: the consumer waits for a batch."""

    time: float


@dataclass(frozen=True, slots=True)
class Delivered:
    """Event: the consumer has taken composed batch ``order``."""

    time: float
    order: OutputBatch
    step_s: float = 0.0  # seconds that the consumer was away before; 0: unknown
    in_flight: int = 0  # bytes of samples and batches that are ready and not delivered
    lease: int = 1  # batches to ask a worker for at once, where each has a stream of its own


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: the time of ``Scheduler.wake_at`` has come, and every unfinished chunk has been reported."""

    time: float


Event = (
    LaneOpened
    | Admitted
    | Fetched
    | Resumed
    | Ended
    | Inspected
    | Finished
    | Lost
    | Running
    | Revoked
    | CollateNeeded
    | Asked
    | Delivered
    | Tick
)

# --- instructions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Instruction: send the chunk to its lane."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Revoke:
    """Instruction: take back the samples of the chunk from offset ``keep`` on that have not started."""

    lane: str
    chunk: int
    keep: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Instruction: hand over the running sample of the chunk at the next of ``splits``, where a device would continue
    it, if it reaches one. ``Finished`` reports the outcome."""

    lane: str
    chunk: int
    splits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compose:
    """Instruction: deliver these tickets as batch ``order``, when its turn comes: in strict order a batch may be
    composed before those of lower orders. With free composition the spans may come from several places. With
    ``Policy.items`` each sample counts as a batch, and ``order`` is that of the first."""

    order: OutputBatch
    spans: tuple[TicketSpan, ...]
    failed: tuple[TicketId, ...] = ()  # samples that raised


Instruction = Dispatch | Revoke | HandOver | Compose


@dataclass(frozen=True, slots=True)
class Awaited:
    """Samples that must become ready before the next batch can be composed."""

    span: TicketSpan
    need: int  # more samples of ``span``
    exactly: bool  # these are all that the batch misses; else any ``need`` of the span, which may suffice
