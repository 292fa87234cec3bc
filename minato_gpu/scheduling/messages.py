"""Events in, instructions out: everything that the scheduler hears and says.

All are small frozen picklable dataclasses, so that a lane can live in another thread, process or machine
and a recorded log of events replays to the same instructions.

Numbers used throughout; each kind has a type (``samples.py``), so that mypy notices where one is taken for another. *Of
the run*, over all its epochs: a *serial* (``TicketId``) counts tickets; a *place* (``SourceBatch``) counts the
sampler's batches, so place k holds the serials that its order puts into the k-th; an *order* (``OutputBatch``) counts
batches as they are delivered (``Compose.order``, ``Load.order``). An epoch's serials, places and orders are each
contiguous; its first place and its first order are the same number (``Epoch.first_order``, ``Record.begins``). *Of the
epoch*: a *position* (``Position``) counts tickets, and a batch's *number* (``Batch.number``) is its order less the
epoch's first; it says on which device the batch lives, so that device number k begins every epoch with the batch of
number k. Times are seconds of any monotonic clock; the scheduler never reads one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minato_gpu.samples import OutputBatch, SourceBatch, TicketId
from minato_gpu.scheduling.plans import Plan
from minato_gpu.spans import Span, TicketSpan, count

NO_BATCH = OutputBatch(-1)
CPU, DEVICE = "cpu", "device"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tickets that travel to a lane together, in the order given.

    ``kind`` is ``"run"`` (prepare the samples), ``"inspect"`` (host read only: reports cost features), ``"collate"``
    (join the prepared samples of the composed batch ``order``) or ``"next"`` (the next batches of the stream of
    ``worker``). ``seconds`` is the predicted time.
    ``stop``: the stage before which the lane stops and hands the samples back for another one (-1: none).
    ``credit``: bytes of prepared samples after which the lane gives the rest back (0: it does not).
    ``worker``: the one of the lane that is to take it (-1: any).
    """

    number: int
    lane: str
    kind: str
    spans: tuple[TicketSpan, ...]
    seconds: float
    order: OutputBatch = NO_BATCH
    stop: int = -1
    credit: int = 0
    worker: int = -1

    @property
    def size(self) -> int:
        """Number of samples."""
        if len(self.spans) == 1:
            return self.spans[0][1] - self.spans[0][0]
        return count(self.spans)


# --- events -----------------------------------------------------------------------------------------------


class LaneCosts(NamedTuple):
    """Of the samples that a lane has prepared: how many, mean and variance of what one takes, in seconds. ``speed``: of
    its slots, where those of this host have 1; ``lease_s``: seconds that a lease takes beside its samples."""

    samples: int
    mean: float
    variance: float
    speed: float = 1.0
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LaneOpened:
    """``slots`` more workers of ``lane`` are ready (negative: that many were lost).

    Of a lane that is open already the rest says nothing new. ``kind``: whose costs are its. ``known``: what samples
    took there in an earlier run. ``on_host``: it is of this host, which alone can read for it, and join batches.
    """

    time: float
    lane: str
    slots: int
    kind: str = CPU
    known: LaneCosts | None = None
    on_host: bool = True


@dataclass(frozen=True, slots=True)
class Admitted:
    """The sampler's next batch: serials ``first`` to ``first + size``.

    ``cpu`` and ``device`` are predicted seconds for each sample on one slot of that lane; None where nothing
    is known. ``between``: for each sample the plans that do its first stages on the CPU and the others on the device,
    where there are any. ``last`` marks the epoch's last batch. ``batch``: the size of the batch of this number where
    that is not the place's own, as an earlier run delivered part of it (0: that batch too, or another event tells).
    ``home``: the side of the device lane that may prepare them, one of ``Policy.homes``. ``fetched``: the serials whose
    bytes have been read ahead already, for the others ``Fetched`` will tell (None: nothing is read ahead). ``follow``:
    samples of the epoch after these, as its sampler's length says, which may be wrong (None: it does not).
    """

    time: float
    place: SourceBatch
    epoch: int
    first: TicketId
    size: int
    cpu: Sequence[float] | None = None
    device: Sequence[float] | None = None
    last: bool = False
    batch: int | None = None
    between: Sequence[Sequence[Plan]] | None = None
    home: str = DEVICE
    fetched: Sequence[TicketSpan] | None = None
    follow: int | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes of these serials, all admitted, are there: each span lies in one place, and is told once."""

    time: float
    spans: Sequence[TicketSpan]


@dataclass(frozen=True, slots=True)
class Resumed:
    """An earlier run delivered the batches before ``order``. Comes before the first ``Admitted`` or ``LaneOpened``.

    Of workers' own streams, those of workers ``ended`` have nothing left, and it is the turn of worker ``turn``.
    """

    time: float
    order: OutputBatch
    turn: int = 0
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The sampler of ``epoch`` has no further batch (sent where the last ``Admitted`` could not know it)."""

    time: float
    epoch: int


@dataclass(frozen=True, slots=True)
class Inspected:
    """Chunk ``chunk`` of kind inspect is done; predictions (see ``Admitted``) for each of its serials, in its order."""

    time: float
    chunk: int
    cpu: Sequence[float]
    device: Sequence[float] | None
    nbytes: int = 0
    between: Sequence[Sequence[Plan]] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The first ``done`` samples of the chunk are ready (cumulative). ``final``: the lane is through with it.

    ``seconds`` and ``nbytes`` are those of the samples newly reported; ``own_s``: their seconds without what a slot has
    waited for a core (None: the same). A final report with ``done`` smaller
    than the chunk gives the rest back: it was revoked before it started. ``failed`` lists offsets in the
    chunk, among those newly reported, that raised an error instead of a sample; ``handed`` those that are not ready but
    handed over, each with the stage that it has come to. What these hold until they are ready is ``handed_bytes``,
    apart from ``nbytes``. ``ended``: of those newly reported, so many of the last found their worker's stream at its
    end, and hold nothing.
    """

    time: float
    chunk: int
    done: int
    seconds: float
    nbytes: int = 0
    final: bool = True
    failed: tuple[int, ...] = ()
    handed: tuple[tuple[int, int], ...] = ()
    handed_bytes: int = 0
    ended: int = 0
    own_s: float | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker of the lane has died, and a slot is gone with it; a replacement comes as ``LaneOpened``.

    What it had of ``chunk`` (None: it had none) and has not reported waits again, but for the offsets ``settled``:
    those are given up. They count as ready, ``failed`` of them (at least one) as errors, and hold ``nbytes``.
    """

    time: float
    lane: str
    chunk: int | None = None
    settled: Span = (0, 0)
    failed: tuple[int, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    """What the lane shows of an unfinished chunk: ``done`` samples are through, if not reported, and the next one has
    been under way for ``since_s``."""

    time: float
    chunk: int
    done: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Revoked:
    """The lane will start no sample of the chunk from offset ``keep`` on; those go back to waiting. ``nbytes``: what
    those before it hold that are ready, reported or not."""

    time: float
    chunk: int
    keep: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class CollateNeeded:
    """The composed batch ``order`` must be joined on the CPU lane; ``seconds`` predicts how long that takes."""

    time: float
    order: OutputBatch
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """The consumer waits for a batch."""

    time: float


@dataclass(frozen=True, slots=True)
class Delivered:
    """Composed batch ``order`` now belongs to the consumer, who was away for ``step_s`` seconds before (0: unknown).

    ``in_flight``: bytes of samples and batches that are ready and not delivered, this one no longer among them.
    ``lease``: batches that a worker is to be asked for at once, where each has a stream of its own.
    """

    time: float
    order: OutputBatch
    step_s: float = 0.0
    in_flight: int = 0
    lease: int = 1


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that ``Scheduler.wake_at`` named has come, and every unfinished chunk has been reported."""

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
    """Hand the chunk to its lane."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Revoke:
    """Take the samples of the chunk from offset ``keep`` on back from the lane, if they have not started."""

    lane: str
    chunk: int
    keep: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """The sample of the chunk that runs is to be handed over at the next of ``splits`` that it comes to, if any.

    Elsewhere no lane would take it. What becomes of that is told by ``Finished``, as ever.
    """

    lane: str
    chunk: int
    splits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compose:
    """The batch to deliver as number ``order`` (rising, without gaps) consists of ``spans``, in this order.

    ``failed`` are the serials among them that raised. With free composition the spans can come from several
    places of the sampler's order.
    """

    order: OutputBatch
    spans: tuple[TicketSpan, ...]
    failed: tuple[TicketId, ...] = ()


Instruction = Dispatch | Revoke | HandOver | Compose


@dataclass(frozen=True, slots=True)
class Awaited:
    """What the next batch to deliver still needs: ``need`` more samples of ``span``; ``exactly``: all that it misses,
    else any, which may be enough."""

    span: TicketSpan
    need: int
    exactly: bool
