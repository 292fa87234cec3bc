"""Shows the training loop's waits as ranges (NVTX) in profilers of GPUs: Nsight Systems, PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable

from minato_gpu.observe import facts as f


class Ranges:
    """Subscribes to facts, and keeps a range open while the training loop waits for the batch that it has asked for.

    ``push`` opens a range of a name on the calling thread, ``pop`` closes the last one.
    """

    def __init__(self, push: Callable[[str], object], pop: Callable[[], object]) -> None:
        self._push, self._pop = push, pop
        self._is_open = False
        self._batch = 0

    def __call__(self, fact: f.Fact) -> None:
        if isinstance(fact, f.BatchAsked):
            self._close()  # what raised before a batch came is over, too
            self._push(f"minato_gpu: epoch {fact.epoch}, batch {self._batch}")
            self._is_open = True
        elif isinstance(fact, f.BatchDelivered):
            self._close()
            self._batch = fact.number + 1
        elif isinstance(fact, (f.EpochBegan, f.EpochEnded)):
            self._close()
            self._batch = 0

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._pop()
