"""Repeats failed micro-batches in parts, so that only bad samples fail, and adapts the micro-batch size to memory.

Decisions:
- DALI reports one failure for the whole micro-batch. Where it names the sample (decoders do), that sample is removed
  and the rest runs again together; otherwise each sample runs by itself and those that fail are bad. So every sample
  runs a few times at most. Rejected: bisection, which decodes large photographs three times over; one graph per stage,
  which would name the stage (the error does so, too) but has to be built while batches are delivered.
- Out of memory is no sample's error: ``device/work.py`` runs the micro-batch again, or smaller ones. Later ones stay
  smaller, but not for ever (another model may have been evaluated at the time). Since a size that is too large costs a
  failed micro-batch, the size doubles only after ``_PATIENCE`` full ones have fitted, and after a failed attempt only
  after twice as many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from minato_gpu.device.accelerator import is_out_of_memory
from minato_gpu.device.dali_errors import sample_of
from minato_gpu.device.values import Result
from minato_gpu.samples import Value

_NAMED = 3  # samples taken out of a micro-batch, one run each, before every sample runs by itself
_PATIENCE = 32  # full micro-batches that must fit before the size doubles
_MOST_PATIENCE = 4096

Samples = Sequence[tuple[Mapping[str, Value], Mapping[int, Value]]]  # fields and drawn parameters


class Size:
    """Samples per micro-batch: ``limit`` now, ``most`` where memory was never short."""

    def __init__(self, most: int) -> None:
        self.limit = self.most = most
        self._patience = _PATIENCE
        self._fitted = 0  # full micro-batches since the limit changed
        self._trying = False  # the limit was raised and has not proved itself

    def fitted(self, count: int) -> None:
        """Records that a micro-batch of ``count`` samples had enough memory; may raise the limit."""
        if count < self.limit or self.limit == self.most:
            return
        self._fitted += 1
        if self._fitted >= self._patience:
            if self._trying:  # the last raise has proved itself
                self._patience = _PATIENCE
            self.set(min(self.most, 2 * self.limit))
            self._trying = True

    def short(self, count: int) -> None:
        """Records that memory was short for ``count`` samples; halves the limit."""
        if self._trying:
            self._patience = min(_MOST_PATIENCE, 2 * self._patience)
            self._trying = False
        self.set(max(1, min(self.limit, count // 2)))

    def set(self, limit: int) -> None:
        """Sets the limit."""
        self.limit, self._fitted = limit, 0


class MicroBatches:
    """Runs micro-batches with ``run``, and failed ones again in parts; ``failed`` makes the result of a bad sample."""

    def __init__(
        self,
        run: Callable[[Samples], list[Result]],
        failed: Callable[[Mapping[str, Value], Exception], Result],
        most: int,
    ) -> None:
        self.size = Size(most)
        self.repeated = 0  # samples that ran again because one of their micro-batch failed
        self.short = 0  # micro-batches that did not fit into memory, counted by the caller
        self._run, self._failed = run, failed

    def run(self, samples: Samples, named: int = _NAMED) -> list[Result]:
        """Returns the results in order. ``named``: how many samples that DALI names may still be removed, one run each.

        Raises an error for which ``is_out_of_memory`` is true when memory is short.
        """
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
        # The bad samples fail again here, each with its own error.
        self.repeated += len(samples)
        return [result for sample in samples for result in self.run([sample])]

    def _without(self, bad: int, samples: Samples, error: Exception, named: int) -> list[Result]:
        """Runs the micro-batch again without sample ``bad``, whose result is ``error``."""
        self.repeated += len(samples) - 1
        failed = self._failed(samples[bad][0], error)
        rest = self.run([*samples[:bad], *samples[bad + 1 :]], named)
        return [*rest[:bad], failed, *rest[bad:]]
