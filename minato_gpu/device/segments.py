"""``Segment``, the interface of the pieces of a device executor: DALI graphs, and runs of CuPy or torch stages.

On device "cpu" segments return NumPy arrays; on CUDA what their library made (objects with ``__dlpack__``). DALI, CuPy
and torch are imported by the first run. Between segments of a GPU values are passed by DLPack without a copy, because
only the next segment uses them. What the host read or drew is copied, because a function may work in place.
"""

from __future__ import annotations

from minato_gpu.device.accelerator import Stream
from minato_gpu.device.current_step import CurrentStep
from minato_gpu.device.values import Batch, Drawn
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.pipeline.stages import Stage
from minato_gpu.samples import Value


class Segment:
    """Consecutive stages of one kind that run as one.

    ``stages``: their numbers in the pipeline; ``made``: names of the fields that earlier segments make; ``device``:
    "cpu" or "cuda:N".
    """

    def __init__(self, pipeline: Pipeline, stages: range, made: frozenset[str], device: str) -> None:
        self.stages = stages
        self.stream: Stream | None = None  # on which results are to be ready; None: on return
        self.at = CurrentStep()  # the step that ``run`` is at
        self._members: tuple[Stage, ...] = pipeline.stages[stages.start : stages.stop]
        self.writes = {name: pipeline.fields_at(stages.stop)[name] for name in pipeline.written(stages)}
        self._reads = pipeline.taken(stages)
        self._made = made
        self._device = device

    def run(self, batch: Batch, drawn: Drawn) -> list[dict[str, Value]]:
        """Returns the fields written for each sample. ``drawn``: each sample's parameters by stage number."""
        raise NotImplementedError

    def load(self) -> None:
        """Imports what ``run`` needs."""
