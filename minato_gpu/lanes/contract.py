"""The interface of a lane to the rest of the loader: commands in, messages out, and nothing else.

No command waits for an answer. What follows from it comes as a message from ``receive``, at once or later, whichever
the lane can: threads and processes of this host answer at once, through shared words; a lane on another machine need
not. So whoever gives a command is to be right whenever the answer comes, and if none does.

What a lane promises:

- A task that was sent ends with one ``Report`` that is ``final``, unless it comes back (``Recalled``) or is lost with
  its worker (``Exit``). Reports of a task follow each other without a gap, and each sample is reported once.
- After ``KeptSamples(keep)`` no sample of the task from ``keep`` on is started. It comes before the task's final
  report, or not at all: then the revocation came too late, or the lane cannot take samples back.
- An ``Exit`` comes after all reports of the worker. Its slot is gone until a replacement has ``Opened`` it.
- Samples are reported of tasks of runs that were given up too: whoever receives them sorts them by ``run``.
- Times are those of this host's ``perf_counter``: a lane elsewhere puts right what its workers say.
- A lane that has not sent ``Opened`` takes tasks, but may do nothing with them for long.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from minato_gpu.lanes.base import Report, Task
from minato_gpu.memory.status_board import Claim
from minato_gpu.util import children

if TYPE_CHECKING:
    from minato_gpu.lanes.produce import Job
    from minato_gpu.lanes.worker_channels import WorkerChannels

Number = tuple[int, int]
"""Run and chunk of a task."""

NO_CLAIM = Claim(-1, -1, 0, 0)
_SHORT = (
    "The kernel had no memory left for its shared memory: the container's memory limit or the machine's is reached, or "
    "/dev/shm is full, where its own code uses that (docker run --shm-size). "
)
_OUT_OF_MEMORY = "It is possible that the worker ran out of memory; see the kernel's log."


# --- messages ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """Says that the lane has ``slots`` more slots that can be given work from now on; below zero: so many fewer."""

    slots: int


@dataclass(frozen=True, slots=True)
class Retired:
    """Says that the lane will do nothing more; others go on without it.

    Tasks that it still has, or is sent, come back by a final ``Report`` of none of their samples.
    """


@dataclass(frozen=True, slots=True)
class Broken:
    """Says why the lane will report nothing more, where no other lane can do its work."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Offers:
    """Says at which split points the lane can continue samples at once, as all that they need is built.

    Sent when that changes.
    """

    splits: frozenset[int]


@dataclass(frozen=True, slots=True)
class KeptSamples:
    """Says that no sample of the task from ``keep`` on will be started."""

    run: int
    chunk: int
    keep: int
    nbytes: int = 0  # bytes of ready samples before ``keep`` that are in no rows; counted where the task has a credit


@dataclass(frozen=True, slots=True)
class Recalled:
    """Says that nobody will begin these tasks, of which nothing was done.

    The lane was asked for them, or cannot do them.
    """

    tasks: tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class AtWork:
    """What a worker is at, and since when, as ``perf_counter`` of this host says.

    ``Claim.started`` is the number of the sample, counted from one; ``together``: how many samples it is at, at once.
    """

    worker: int
    claim: Claim
    since: float
    together: int = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """Says what every worker that is at work is at: the answer to ``look``."""

    at_work: tuple[AtWork, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """A worker that ended."""

    number: int
    pid: int
    code: int | None  # exit code; negative: a signal; None: a thread, or not started; children.UNKNOWN: not known
    start_error: str = ""  # why it could not even be started
    error: str = ""  # the name of the exception that ended it
    raised: str = ""  # traceback of that exception
    hung: str = ""  # it was killed, because it had hung: what it was at
    claim: Claim = NO_CLAIM  # what it had taken last

    def message(self) -> str:
        """Returns what PyTorch says of a dead worker, with what is known besides."""
        if self.hung or self.start_error:
            return self.hung or f"DataLoader worker {self.number} could not be replaced: {self.start_error}"
        ended = f"was ended by {self.error}, raised by what it was at:\n{self.raised}"
        if self.raised and self.code is None:
            return f"DataLoader worker thread {self.number} {ended}"
        return self._as_pytorch_says() + (f"It {ended}" if self.raised else "")

    def _as_pytorch_says(self) -> str:
        if self.code is None or self.code >= 0:
            return f"DataLoader worker (pid(s) {self.pid}) exited unexpectedly with {children.in_words(self.code)}. "
        name = signal.strsignal(-self.code) or f"signal {-self.code}"
        causes: dict[int, str] = {signal.SIGKILL: _OUT_OF_MEMORY, signal.SIGBUS: _SHORT}
        return f"DataLoader worker (pid {self.pid}) is killed by signal: {name}. {causes.get(-self.code, '')}"


Message = Report | Opened | Retired | Broken | Offers | KeptSamples | Recalled | Progress | Exit


# --- the contract -----------------------------------------------------------------------------------------


class Lane(Protocol):
    """A place where work happens. All members are for one thread at a time: whoever holds the engine's lock.

    Lanes are subclasses. Each has its own of every method that has no body here, or mypy says that it is abstract. A
    command that only returns here may be left out, where a lane can do nothing about it.

    ``name``: what it is called, in messages to the scheduler and to people; no other lane of the loader has this name.
    ``kind``: ``CPU`` or ``DEVICE`` (scheduling/messages.py), whose costs apply to its work. ``slots``: how many
    workers it has where none is missing. ``can_kill``: a worker that hangs can be ended, and one that has ended be
    replaced. ``shows_progress``: the samples of a task are done one by one, so that those behind a slow one can be
    taken back. ``advice``: why a worker that hangs is not replaced, in a sentence. ``on_host``: its workers share this
    host's memory and cores, so that CPU workers are sent host reads and batches to join, too. ``has_arenas``: what a
    worker has stored in this host's memory ends with it; its number is that of its arena (``Blob.worker``).

    A lane has whoever waits for it woken by ``WorkerChannels.announce``, once ``receive`` would return a message.
    """

    name: str
    kind: str
    slots: int
    can_kill: bool
    shows_progress: bool
    advice: str
    on_host: bool = True
    has_arenas: bool = False

    def resize(self, slots: int) -> None:
        """Has so many workers take tasks, at most as many as it was made with; answered by ``Opened``.

        The others finish the tasks that they have, and rest.
        """
        return

    # --- work ---

    def send(self, task: Task, worker: int = 0) -> None:
        """Hands over a task, for any worker or, where each has a stream of its own, for this one. Never blocks."""

    def recall(self) -> None:
        """Takes back the tasks that have not begun; answered by ``Recalled`` if there are any."""

    def revoke(self, run: int, chunk: int, keep: int) -> None:
        """Starts no sample of the task from number ``keep`` on. ``KeptSamples`` answers where it stops."""
        return

    def hand_over(self, run: int, chunk: int, splits: Sequence[int]) -> None:
        """Asks the worker that is at this task to hand its current sample over, before the next of ``splits`` that the
        sample comes to, if any."""
        return

    def look(self) -> None:
        """Asks what is finished of tasks that have not ended, and what workers are at; answered by reports, then
        ``Progress``."""

    # --- what it tells ---

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        """Returns what has been reported since the last call.

        Never blocks, and costs next to nothing if there is nothing.

        ``only``: reports on these tasks are enough, also where they have not ended; other messages may wait.
        """

    def sleep(self, *, every_task: bool) -> None:
        """Called before the receiver waits: it is woken by every task's end, or only once the lane has little left to
        do."""
        return

    def fault_fds(self) -> list[int]:
        """Returns descriptors, which never change, that are readable when a worker has ended, or a replacement has
        started."""
        return []

    # --- faults ---

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Starts another worker in place of one that has ended; answered by ``Opened``, or by an ``Exit`` with a start
        error.

        ``blocks`` (offset, bytes) are those of the dead worker's that are still in use.
        """
        return

    def kill(self, worker: int, hung: str) -> None:
        """Kills a worker that has hung; ``hung`` says what it was at, and comes back with its ``Exit``."""
        return

    # --- what is said of it (may take a moment: somebody is about to read an error) ---

    def who(self, worker: int) -> str:
        """Returns a worker in words."""

    def stack_of_hung(self, worker: int) -> str:
        """Returns the stack of this worker, as the rest of an error's message; it is taken to hang from now on."""

    def stacks_at_work(self) -> str:
        """Returns the stacks of all workers that are at work, as text for an error's message.

        If none is at work, a lane returns those of all of its workers, or "".
        """

    def stats(self) -> Mapping[str, bool | int | float]:
        """Returns counters of its own, if any, for the loader's ``stats()``."""
        return {}

    # --- the end ---

    def close(self, timeout: float) -> bool:
        """Ends everything that the lane started; what is still at a sample after ``timeout`` seconds is killed, if it
        can be.

        Idempotent. Returns False if something still runs and uses its memory.
        """


class LaneSource(Protocol):
    """Opens lanes for a loader, beside its own workers and devices."""

    @property
    def slots(self) -> int:
        """Number of CPU workers that these lanes have together."""

    def open(self, job: Job, links: WorkerChannels) -> Iterable[Lane]:
        """Opens lanes that prepare samples as ``job`` says, and put them where ``links`` has room for them."""
