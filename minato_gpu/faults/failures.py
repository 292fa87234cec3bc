"""Handling of samples that cannot be prepared: raise, leave out, or ask the user's function. (Those to be tried again
are in lanes/produce.py.)

A batch of which samples are left out is delivered with the others. The decision is taken when the batch is about to be
delivered, on the consumer's thread: a sample that nobody asked for raises nothing. A failure is counted once, and
``max_failures`` bounds how many an epoch may have, of one rank where there are several. A resumed epoch counts on from
the state; where the ranks are others than before, they share the old ones' count out among them.

In a distributed job every rank must have the batches that its sampler's positions fix, or the others wait for it for
ever. A batch of which nothing is left then repeats a sample that did not fail, prepared once more with the same draws:
the last one delivered before, else the first of the batches to come. So no rank needs to know of another's failures.
Rejected: keeping a copy of a sample from every batch, which would cost all those that lose nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Final, Literal

from torch._utils import ExceptionWrapper

from minato_gpu.lanes.base import Failure, reraise
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.samples import JSON, Key, Origin, Position, shown
from minato_gpu.sampling.delivered_positions import DeliveredPositions
from minato_gpu.util.numbers import is_real, is_whole

RAISE: Final = "raise"
SKIP: Final = "skip"
RETRY: Final = "retry"
_KEPT = 100  # failures in stats(), the latest


@dataclass(frozen=True, slots=True)
class BadSample:
    """One sample that failed: where, and why. What is not known is None.

    Args:
        epoch: in which it failed.
        position: its place in the sampler's order of that epoch.
        index: the key that the sampler yielded.
        stage: a stage of the pipeline, or "send": pickling and storing the sample.
        lane: where it was prepared.
        path: of its file.
        error: the name of the exception's type.
        traceback: the original one, as text.
    """

    epoch: int | None
    position: Position | None
    index: Key
    stage: str | None
    lane: str | None
    path: str | None
    error: str
    traceback: str

    @classmethod
    def of(cls, failure: Failure) -> BadSample:
        """Returns the description of a failure."""
        origin, error = failure.origin or Origin(), failure.error
        where = {each.name: getattr(origin, each.name) for each in fields(Origin)}
        return cls(**where, error=failure.name or error.exc_type.__name__, traceback=str(error.exc_msg))

    def plain(self) -> dict[str, JSON]:
        """Returns the description as plain data."""
        return {**asdict(replace(self, index=None)), "index": shown(self.index)}


class TooManyFailures(RuntimeError):
    """More samples failed in one epoch than ``max_failures`` allows."""


OnError = Literal["raise", "retry", "skip"] | Callable[[BadSample], str]


class FailurePolicy:
    """Applies ``on_error`` and ``max_failures`` (a count, or a share of the samples; None: no limit) in one epoch.

    ``expected``: samples of the epoch, of which ``max_failures`` is a share. None if the sampler has no length: then it
    is a share of the samples seen so far, and one failure is always allowed. ``log`` counts those delivered and left
    out in this run, ``before`` says what an earlier run had delivered and left out.
    """

    def __init__(
        self,
        on_error: OnError,
        max_failures: float | None,
        expected: int | None,
        log: Telemetry,
        before: DeliveredPositions | None = None,
    ) -> None:
        self._on_error = on_error
        self._limit = max_failures
        self._expected = expected
        self._log = log
        before = DeliveredPositions() if before is None else before
        self.count = before.failed
        self._seen = before.samples - before.failed
        self.recent: deque[dict[str, JSON]] = deque(maxlen=_KEPT)

    def take(self, failures: Sequence[Failure], delivered: int) -> None:
        """Leaves these samples of a batch out, and counts them; or raises what one of them raised.

        If it raises, the ``delivered`` other samples of the batch are lost too. Raises TooManyFailures beyond the
        budget, and ValueError for an answer of ``on_error`` that means nothing.
        """
        self._log.lost(len(failures), 0)
        try:
            for failure in failures:
                self._leave_out(failure, delivered)
        except BaseException:
            self._log.lost(0, delivered)
            raise

    def _leave_out(self, failure: Failure, delivered: int) -> None:
        bad = BadSample.of(failure)
        if self._answer(bad) == RAISE:
            reraise(failure.error)
        self.count += 1
        self.recent.append(bad.plain())
        self._check_budget(failure.error, self._seen + self._log.samples + delivered + self.count)

    def _answer(self, bad: BadSample) -> str:
        if not callable(self._on_error):
            return self._on_error
        answer: object = self._on_error(bad)
        if not isinstance(answer, str) or answer not in (RAISE, SKIP):
            raise ValueError(f"on_error returned {answer!r} for a bad sample; it must return 'skip' or 'raise'")
        return answer

    def _check_budget(self, last: ExceptionWrapper, seen: int) -> None:
        limit = self._limit
        if limit is None:
            return
        if not is_whole(limit):
            # without a length it is a share of what has been seen, of which the first failure may be a large one
            share = float(limit)
            limit = share * self._expected if self._expected is not None else max(1.0, share * seen)
        if self.count > limit:
            text = f"{self.count} samples failed in this epoch, max_failures={self._limit!r} allows {int(limit)}"
            raise TooManyFailures(f"{text}. The last of them: {last.exc_msg}")


def check_on_error(on_error: object, max_failures: object) -> None:
    """Raises TypeError or ValueError if the two arguments mean nothing, or not together."""
    if not callable(on_error) and on_error not in (RAISE, SKIP, RETRY):
        raise ValueError(f"on_error must be 'raise', 'skip', 'retry' or a function, got {on_error!r}")
    if max_failures is None:
        return
    if not is_real(max_failures):
        raise TypeError(f"max_failures must be a count, a share or None, got {max_failures!r}")
    if max_failures < 0 or (not is_whole(max_failures) and not max_failures <= 1):
        raise ValueError(f"max_failures must be a count (an int) or a share from 0.0 to 1.0, got {max_failures!r}")
    if on_error in (RAISE, RETRY):
        raise ValueError(f"max_failures bounds what is left out; on_error={on_error!r} leaves nothing out")
