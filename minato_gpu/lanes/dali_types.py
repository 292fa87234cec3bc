"""What the device lane needs of DALI's objects, which come without types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from minato_gpu.memory.accelerator import Stream

Node = object
"""An operator's output while a graph is defined: known to DALI and to the fragments alone."""


class Output(Protocol):
    """One output of a run, ``TensorListCPU`` or ``TensorListGPU``: a micro-batch of one field."""

    @property
    def dtype(self) -> object:
        """One of DALI's types."""

    def shape(self) -> Iterable[Sequence[int]]:
        """Of each sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> object: ...

    def copy_to_external(self, into: object, stream: object = None, *, non_blocking: bool = False) -> None:
        """Copy all samples, one behind the other."""


class Graph(Protocol):
    """A built ``Pipeline`` with dynamic execution."""

    def feed_input(self, source: str, values: Sequence[object]) -> None:
        """The samples of an input, for the next run."""

    def run(self, stream: Stream | None) -> Sequence[Output]:
        """A run on what was fed."""

    def input_feed_count(self, source: str) -> int:
        """How many batches of an input a run needs first. KeyError where it has no such input."""
