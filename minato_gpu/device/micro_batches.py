"""What becomes of a micro-batch that fails: which of its samples run again, how many together, how many from then on.

Decisions:
- DALI reports a failure for the whole micro-batch. Where it names the sample (decoders do), that one is taken out, and
  the rest runs again, together. Where it names none, each sample runs again by itself: what fails there is bad. So
  every sample runs a few times at most. Rejected: halving the micro-batch until the bad sample is found, which decodes
  large photographs three times over; graphs of single stages, which tell the stage but have to be built while batches
  are delivered: the error tells it too.
- Where memory is short no sample is bad, and nothing of the micro-batch is kept: ``device_work`` tries it again, or
  smaller ones. Later ones stay that small, but not for ever: memory was short while another model was evaluated, say.
  As trying too much costs a micro-batch that fails, the size doubles only after ``_PATIENCE`` full ones have fitted,
  and where that was too much, after twice as many the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from minato_gpu.device.accelerator import is_out_of_memory
from minato_gpu.device.dali_errors import sample_of
from minato_gpu.device.values import Result
from minato_gpu.samples import Value

_NAMED = 3  # samples taken out of a micro-batch, one run each, before every sample runs by itself
_PATIENCE = 32
_MOST_PATIENCE = 4096

Samples = Sequence[tuple[Mapping[str, Value], Mapping[int, Value]]]  # fields and drawn parameters


class Size:
    """How many samples a micro-batch holds: ``limit`` from now on, ``most`` where memory has never been short."""

    def __init__(self, most: int) -> None:
        self.limit = self.most = most
        self._patience = _PATIENCE
        self._fitted = 0  # full micro-batches, since the limit changed
        self._trying = False  # the limit has been raised, and nobody knows whether that lasts

    def fitted(self, count: int) -> None:
        """A micro-batch of ``count`` samples had enough memory."""
        if count < self.limit or self.limit == self.most:
            return
        self._fitted += 1
        if self._fitted >= self._patience:
            if self._trying:  # the last one lasted
                self._patience = _PATIENCE
            self.set(min(self.most, 2 * self.limit))
            self._trying = True

    def short(self, count: int) -> None:
        """There was not enough for ``count`` samples."""
        if self._trying:
            self._patience = min(_MOST_PATIENCE, 2 * self._patience)
            self._trying = False
        self.set(max(1, min(self.limit, count // 2)))

    def set(self, limit: int) -> None:
        """This many, whatever was before."""
        self.limit, self._fitted = limit, 0


class MicroBatches:
    """Runs micro-batches by ``run``, and those that fail once more or in parts; ``failed`` makes a result of an error.

    ``repeated`` counts the samples that ran again because they, or another of their micro-batch, failed; ``short``, for
    whoever has them run, how often they did not fit into memory.
    """

    def __init__(
        self,
        run: Callable[[Samples], list[Result]],
        failed: Callable[[Mapping[str, Value], Exception], Result],
        most: int,
    ) -> None:
        self.size = Size(most)
        self.repeated = self.short = 0
        self._run, self._failed = run, failed

    def run(self, samples: Samples, named: int = _NAMED) -> list[Result]:
        """The results, in order; ``named``: how many samples may still be taken out. Raises where memory is short."""
        if not samples:
            return []
        try:
            found = self._run(samples)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            bad = sample_of(error)
            if len(samples) == 1 or (bad is not None and bad < len(samples) and named):
                return self._without(bad or 0, samples, error, named - 1)
        else:
            self.size.fitted(len(samples))
            return found
        # Nothing is lost: what caused it fails again here, with its own error and by itself.
        self.repeated += len(samples)
        return [result for sample in samples for result in self.run([sample])]

    def _without(self, bad: int, samples: Samples, error: Exception, named: int) -> list[Result]:
        """The micro-batch again, but for the sample of which ``error`` is."""
        self.repeated += len(samples) - 1
        failed = self._failed(samples[bad][0], error)
        rest = self.run([*samples[:bad], *samples[bad + 1 :]], named)
        return [*rest[:bad], failed, *rest[bad:]]
