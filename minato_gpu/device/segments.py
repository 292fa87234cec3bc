"""The pieces that a device executor is made of: DALI graphs, and runs of CuPy or of torch stages.

With device "cpu" every segment returns NumPy arrays; on CUDA it returns what its library made (objects with
``__dlpack__``). DALI, CuPy and torch are imported by the first run. Between segments values are handed over by DLPack,
which copies nothing: what an earlier segment has made belongs to nobody else. What the host read left is copied,
because a function may work in place; so is what was drawn.
"""

from __future__ import annotations

from collections.abc import Mapping

from minato_gpu.device.accelerator import Stream
from minato_gpu.device.current_step import CurrentStep
from minato_gpu.device.values import Batch, Drawn
from minato_gpu.pipeline import Pipeline
from minato_gpu.samples import Value
from minato_gpu.stages import Stage


class Segment:
    """Consecutive stages of one kind that run as one; ``stages`` holds their numbers in the pipeline, ``writes`` what
    they write.

    ``made``: names of the fields that earlier segments make. ``builds``: how often ``run`` has had to build something
    first. ``stream``: the CUDA stream on which results are to be ready, None to wait for them on the host. ``at``:
    where ``run`` notes what it is at.
    """

    def __init__(self, pipeline: Pipeline, stages: range, made: frozenset[str], device: str) -> None:
        self.stages = stages
        self.builds = 0
        self.stream: Stream | None = None
        self.at = CurrentStep()
        self._members: tuple[Stage, ...] = pipeline.stages[stages.start : stages.stop]
        self.writes = {name: pipeline.fields_at(stages.stop)[name] for name in pipeline.written(stages)}
        self._reads = pipeline.taken(stages)
        self._made = made
        self._device = device

    def run(self, batch: Batch, drawn: Drawn) -> list[dict[str, Value]]:
        """The fields written for each sample; ``drawn`` holds each sample's parameters by stage number."""
        raise NotImplementedError

    def ahead(self, batch: Batch, drawn: Drawn) -> bool:
        """Begin a micro-batch behind the one that is at work, of which no more is asked before ``run`` is called for
        it, with the same parameters; whether that was done."""
        return False

    def forget(self) -> None:
        """Nobody will ask for what was begun ahead."""

    @property
    def built(self) -> bool:
        """Whether ``run`` would find everything built."""
        return True

    def load(self) -> None:
        """Import what ``run`` will need."""

    def build(self, params: Mapping[int, Mapping[str, Value]]) -> None:
        """Build what ``run`` would build, from the drawn parameters of any sample, or of none (empty): then which there
        are is learned from what asks for them."""

    def sweep(self) -> None:
        """Let go of what the device is through with; never waits."""

    def close(self) -> None:
        """Let go of memory and threads. Idempotent; a later ``run`` builds them again."""
