"""Builds DALI graphs while the lane opens, so that no batch waits for one.

DALI holds the interpreter lock while it builds, which stops the training loop, so graphs are built before the first
sample. A graph whose fragments need the names of all drawn parameters is built at the first sample, whose draws tell
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minato_gpu.device.accelerator import is_out_of_memory
from minato_gpu.device.dali_graph import NamesUnknown
from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.values import ExecutorInput
from minato_gpu.util.messages import LOGGER


class BuildAhead:
    """Builds the graphs of ``executors`` (by split point). For the thread that runs them."""

    def __init__(self, executors: Mapping[int, DeviceExecutor]) -> None:
        self._missing = dict(executors)

    def open(self) -> None:
        """Builds what needs no sample. Raises a fragment's error that a sample would not change."""
        for split, executor in list(self._missing.items()):
            try:
                executor.build({})
            except Exception as error:
                if not (isinstance(error, NamesUnknown) or is_out_of_memory(error)):
                    raise
                LOGGER.debug("the device's graph from stage %d on waits for a sample (%r)", split, error)
            else:
                del self._missing[split]

    def start(self, samples: Sequence[ExecutorInput]) -> None:
        """Builds the remaining graphs from the draws of the first sample whose draws raise nothing. Raises a fragment's
        error."""
        for sample in samples if self._missing else ():
            try:
                draws = {split: executor.draws(sample) for split, executor in self._missing.items()}
            except Exception:  # noqa: S112 - the sample fails by itself when it is prepared
                continue
            for split, params in draws.items():
                self._missing.pop(split).build(params)
            return
