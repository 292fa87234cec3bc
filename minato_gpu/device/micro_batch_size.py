"""The micro-batch size, adapted to the device's memory.

Decision: memory that was short makes later micro-batches smaller, but not for ever (another model may have been
evaluated at the time). Since a size that is too large costs a failed micro-batch, the size doubles only after
``_PATIENCE`` full ones have fitted, and after a failed attempt only after twice as many.
"""

from __future__ import annotations

_PATIENCE = 32  # full micro-batches that must fit before the size doubles
_MOST_PATIENCE = 4096


class MicroBatchSize:
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
