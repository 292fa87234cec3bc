"""Graphs built before they are needed: all that a lane may need, while it opens, so that no batch waits for one.

DALI holds the interpreter lock while it builds, and with it the training loop. So a graph is built before there is a
sample. One whose fragments want to know all names of what is drawn waits for the first sample that comes: its draws
tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minato_gpu.device.accelerator import is_out_of_memory
from minato_gpu.device.dali_graph import NamesUnknown
from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.values import Given
from minato_gpu.notices import LOGGER


class BuildAhead:
    """Builds the graphs of ``executors``, by split point. For one thread: that which runs them."""

    def __init__(self, executors: Mapping[int, DeviceExecutor]) -> None:
        self._missing = dict(executors)

    def open(self) -> None:
        """Build what can be built without a sample. Raises what a fragment raises that no sample would change."""
        for split, executor in list(self._missing.items()):
            try:
                executor.build({})
            except Exception as error:
                if not (isinstance(error, NamesUnknown) or is_out_of_memory(error)):
                    raise
                LOGGER.debug("the device's graph from stage %d on waits for a sample (%r)", split, error)
            else:
                del self._missing[split]

    def start(self, samples: Sequence[Given]) -> None:
        """Build the others, with the draws of the first of these samples for which nothing raises, if there is one.
        Raises what a fragment raises."""
        for sample in samples if self._missing else ():
            try:
                draws = {split: executor.draws(sample) for split, executor in self._missing.items()}
            except Exception:  # noqa: S112 - its own business: it fails by itself where it is prepared
                continue
            for split, params in draws.items():
                self._missing.pop(split).build(params)
            return
