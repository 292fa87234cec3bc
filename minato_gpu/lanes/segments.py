"""The pieces that a device executor is made of: DALI graphs, and runs of CuPy or of torch stages.

A segment runs consecutive stages of one kind on a list of samples. With device "cpu" every segment returns NumPy
arrays; on CUDA it returns what its library made (objects with ``__dlpack__``). DALI, CuPy and torch are imported
by the first run. Between segments values are handed over by DLPack, which copies nothing: what an earlier segment has
made belongs to nobody else. What the host read left is copied, because a function may work in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from minato_gpu.lanes.current_step import CurrentStep
from minato_gpu.lanes.dali_graph import DaliGraph
from minato_gpu.lanes.functions import FunctionSegment
from minato_gpu.lanes.values import Batch, Drawn
from minato_gpu.memory.accelerator import Stream
from minato_gpu.pipeline import Pipeline
from minato_gpu.samples import Value
from minato_gpu.stages import DaliFragment


class Segment(Protocol):
    """Consecutive stages that run as one; ``stages`` holds their numbers in the pipeline.

    ``builds``: how often ``run`` has had to build something first. ``stream``: the CUDA stream on which results are to
    be ready, None to wait for them on the host. ``at``: where ``run`` notes what it is at.
    """

    stages: range
    builds: int
    stream: Stream | None
    at: CurrentStep

    def run(self, batch: Batch, drawn: Drawn) -> list[dict[str, Value]]:
        """The fields written for each sample; ``drawn`` holds each sample's parameters by stage number."""
        ...

    def load(self) -> None:
        """Import what ``run`` will need."""
        ...

    @property
    def built(self) -> bool:
        """Whether ``run`` would find everything built."""
        ...

    def build(self, params: Mapping[int, Mapping[str, Value]]) -> None:
        """Build what ``run`` would build, from the drawn parameters of any sample, or of none (empty): then which there
        are is learned from what asks for them."""
        ...

    def close(self) -> None:
        """Let go of memory and threads. Idempotent; a later ``run`` builds them again."""
        ...


def segments(pipeline: Pipeline, stages: range, *, device: str, max_batch: int, threads: int) -> list[Segment]:
    """The segments that run ``stages`` in turn: consecutive stages of one kind are one.

    Raises ValueError for a stage without a device implementation.
    """
    found: list[Segment] = []
    for numbers in _groups(pipeline, stages):
        if isinstance(pipeline.stages[numbers.start].device, DaliFragment):
            made = written(pipeline, range(stages.start, numbers.start))
            found.append(DaliGraph(pipeline, numbers, made, device=device, max_batch=max_batch, threads=threads))
        else:
            made = written(pipeline, range(stages.start, numbers.start))
            found.append(FunctionSegment(pipeline, numbers, made, device=device))
    return found


def _groups(pipeline: Pipeline, stages: range) -> Iterator[range]:
    begin = stages.start
    for number in stages:
        stage = pipeline.stages[number]
        if stage.device is None:
            raise ValueError(f"stage {stage.name!r} has no device implementation")
        following = pipeline.stages[number + 1].device if number + 1 < stages.stop else None
        if type(stage.device) is type(following):
            continue
        yield range(begin, number + 1)
        begin = number + 1


def written(pipeline: Pipeline, stages: range) -> frozenset[str]:
    """Names of the fields that these stages write."""
    return frozenset(name for number in stages for name in pipeline.stages[number].writes)
