"""The device executor: runs the device implementations of a pipeline's last stages on micro-batches.

``DeviceExecutor`` divides the stages into segments: consecutive DALI stages become one DALI graph, fed by
``external_source`` with micro-batches of any size; CuPy and torch stages run sample by sample. On device "cpu" the same
code runs DALI's CPU operators, NumPy and CPU tensors. DALI, CuPy and torch are imported when first needed.

Decisions:
- ``exec_dynamic=True``: without it, later runs overwrote views of outputs. With it, a view keeps its micro-batch's
  buffer alive, even beyond the executor.
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

from collections.abc import Mapping, Sequence
from itertools import groupby

from minato_gpu.device.accelerator import Stream, is_out_of_memory
from minato_gpu.device.current_step import CurrentStep
from minato_gpu.device.dali_graph import DaliGraph, sample_of
from minato_gpu.device.functions import FunctionSegment
from minato_gpu.device.segments import Segment
from minato_gpu.device.values import ExecutorInput, Result
from minato_gpu.lanes.base import Draws
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.pipeline.stages import DaliFragment, check_written, stage_error
from minato_gpu.samples import StageError, Value

Fields = Mapping[str, Value]
Samples = Sequence[tuple[Fields, Draws]]

_PATIENCE = 32  # full micro-batches that must fit before the size doubles
_MOST_PATIENCE = 4096
_NAMED = 3  # samples taken out of a micro-batch, one run each, before every sample runs by itself


class MicroBatchSize:
    """Samples per micro-batch: ``limit`` now, ``most`` where memory was never short."""

    def __init__(self, most: int) -> None:
        self.limit = self.most = most
        self._patience = _PATIENCE
        self._fitted = 0  # full micro-batches since the limit changed
        self._trying = False  # the limit was raised and has not proved itself

    def fitted(self, count: int) -> None:
        """Records that memory sufficed for ``count`` samples at once; doubles the limit after enough full ones."""
        if count < self.limit or self.limit == self.most:
            return
        self._fitted += 1
        if self._fitted >= self._patience:
            if self._trying:  # the last raise has proved itself
                self._patience = _PATIENCE
            self.set(min(self.most, 2 * self.limit))
            self._trying = True

    def short(self, count: int) -> None:
        """Records that memory was short for ``count`` samples; lowers the limit to half of these, but at least 1."""
        if self._trying:
            self._patience = min(_MOST_PATIENCE, 2 * self._patience)
            self._trying = False
        self.set(max(1, min(self.limit, count // 2)))

    def set(self, limit: int) -> None:
        """Sets the limit; full micro-batches are counted from zero again."""
        self.limit, self._fitted = limit, 0


class DeviceExecutor:
    """Runs the stages from ``start`` to ``stop`` of a pipeline by their device implementations. For one thread at a
    time.

    Args:
        start: number of the first stage.
        stop: number after the last stage; None: to the pipeline's end.
        device: "cpu", "cuda" or "cuda:N".
        max_batch: most samples in a micro-batch; more are run as several.
        threads: DALI's threads on the CPU.
        at: where the current step is noted.

    Raises ValueError when ``stop`` is None and ``start`` is not among ``pipeline.splits``, for a stage without a device
    implementation, and for a ``max_batch`` or ``threads`` below 1.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        start: int,
        stop: int | None = None,
        *,
        device: str = "cpu",
        max_batch: int = 64,
        threads: int = 1,
        at: CurrentStep | None = None,
    ) -> None:
        if stop is None and start not in pipeline.splits:
            raise ValueError(f"{start} is not a split point of pipeline {pipeline.name!r}; legal are {pipeline.splits}")
        if max_batch < 1 or threads < 1:
            raise ValueError(f"max_batch and threads must be at least 1, got {max_batch} and {threads}")
        self.pipeline, self.device = pipeline, device
        self.size = MicroBatchSize(max_batch)
        self.repeated = 0  # samples that ran again because one of their micro-batch failed
        self.short = 0  # micro-batches that did not fit into memory, counted by the caller
        self._first_runs = 0
        self._stages = range(start, len(pipeline.stages) if stop is None else stop)
        self._segments = segments(pipeline, self._stages, device=device, max_batch=max_batch, threads=threads)
        self.at = CurrentStep() if at is None else at  # the current step
        for segment in self._segments:
            segment.at = self.at
        self._graphs = [segment for segment in self._segments if isinstance(segment, DaliGraph)]
        self._input_fields = pipeline.fields_at(start)
        self._missing_reads: dict[int, list[str]] = {}  # fields that stage n reads from the input
        for number in self._stages:
            earlier = pipeline.written(range(start, number))
            self._missing_reads[number] = [name for name in pipeline.stages[number].reads if name not in earlier]
        made = pipeline.written(self._stages)
        # names of all fields of a result, and of those that device stages wrote (``made``)
        self.makes = pipeline.outputs if self._stages.stop == len(pipeline.stages) else made
        self._passed_through = [name for name in self.makes if name not in made]
        self.made = frozenset(made).intersection(self.makes)

    @property
    def built(self) -> bool:
        """True when the next run builds no graph."""
        return all(graph.built for graph in self._graphs)

    def draws(self, sample: ExecutorInput) -> Draws:
        """Returns a sample's drawn parameters for ``build``; of its fields only those that the host read made are used.
        Raises whatever drawing raises."""
        fields, seed = sample
        if not isinstance(seed, int):
            return {number: seed[number] for number in self._stages}
        return {number: self.pipeline.draw(number, fields, seed) for number in self._stages}

    def build(self, params: Mapping[int, Mapping[str, Value]]) -> None:
        """Builds the graphs from the parameters of any sample, or from none (empty); see ``DaliGraph.build``."""
        for graph in self._graphs:
            graph.build(params)

    @property
    def builds(self) -> int:
        """Number of graphs built so far. A run that builds one takes much longer; so does the first run on a GPU, which
        loads and compiles kernels and counts as one."""
        return self._first_runs + sum(graph.builds for graph in self._graphs)

    def run(self, items: Sequence[ExecutorInput], stream: Stream | None = None) -> list[Result]:
        """Prepares samples; returns results in the same order, a StageError in place of a bad sample.

        The input fields are those that exist at ``start`` (at least ``pipeline.live(start)``; "path" helps in errors).
        A result holds the pipeline's outputs, or what the stages wrote when ``stop`` is not the end: NumPy arrays on
        device "cpu", else objects with ``__dlpack__`` on the device; fields that no device stage wrote are passed
        through. A result keeps the memory of its whole micro-batch alive.

        With ``stream``, the current CUDA stream of the thread, results are ready on that stream and the host has not
        waited. Raises an error for which ``is_out_of_memory`` is true when memory is short for a micro-batch.
        """
        for segment in self._segments:
            segment.stream = None if self.device == "cpu" else stream
        results: list[Result] = []
        while len(results) < len(items):
            first, most = len(results), self.size.limit
            results += self._run_batch(items[first : first + most], first)
        if items and self.device != "cpu":
            self._first_runs = 1
        return results

    def ahead(self, items: Sequence[ExecutorInput]) -> bool:
        """Schedules samples behind the current micro-batch; ``run`` must be called with them next.

        Returns False, with nothing scheduled, unless DALI runs the first stages, the samples' parameters are drawn,
        they fit into one micro-batch and the graph takes them (``DaliGraph.ahead``).
        """
        drawn = [draws for _, draws in items if not isinstance(draws, int)]
        if not 0 < len(items) <= self.size.limit or len(drawn) < len(items):
            return False
        first = self._segments[0]
        return isinstance(first, DaliGraph) and first.ahead([fields for fields, _ in items], drawn)

    def forget(self) -> None:
        """Waits for what was scheduled ahead, and drops it: ``run`` will not be called with it."""
        for graph in self._graphs:
            graph.forget()

    def load(self) -> None:
        """Imports the libraries that the stages need (DALI takes most of a second), before the first ``run``."""
        for segment in self._segments:
            segment.load()

    def sweep(self) -> None:
        """Frees what the device has finished reading; never waits."""
        for graph in self._graphs:
            graph.sweep()

    def close(self) -> None:
        """Frees graphs, threads and device memory. Idempotent."""
        for graph in self._graphs:
            graph.close()

    def _run_batch(self, items: Sequence[ExecutorInput], first: int) -> list[Result]:
        drawn = [
            self._prepare(fields, seed, first + n) if isinstance(seed, int) else seed
            for n, (fields, seed) in enumerate(items)
        ]
        self.at.prepared(drawn, first)
        ready = [(fields, p) for (fields, _), p in zip(items, drawn, strict=True) if not isinstance(p, StageError)]
        found = iter(self._run_parts(ready))
        return [p if isinstance(p, StageError) else next(found) for p in drawn]

    def _failure(self, fields: Fields, error: Exception) -> StageError:
        """Returns the error of a sample, with its stage where that is known: a DALI graph of several stages names none,
        but DALI's text does."""
        at = self.at.step.stage
        known = any(at in s.stages and (len(s.stages) == 1 or not isinstance(s, DaliGraph)) for s in self._segments)
        return _failed(self.pipeline.stages[at].name if known else None, fields, error)

    def _prepare(self, fields: Fields, seed: int, sample: int) -> Draws | StageError:
        """Returns a sample's drawn parameters by stage number, or the error of its fields or draws."""
        params: dict[int, Value] = {}
        for number in self._stages:
            stage = self.pipeline.stages[number]
            self.at.enter(number, sample)
            try:
                params[number] = self.pipeline.draw(number, fields, seed)
                for name in self._missing_reads[number]:
                    problem = self._input_fields[name].problem(fields[name]) if name in fields else "is missing"
                    if problem is not None:
                        raise ValueError(f"field {name!r} {problem}")
            except Exception as error:
                return _failed(stage.name, fields, error)
        absent = [name for name in self._passed_through if name not in fields]
        return _failed(None, fields, KeyError(f"the sample has no field {absent[0]!r}")) if absent else params

    def _run_parts(self, samples: Samples, named: int = _NAMED) -> list[Result]:
        """Runs a micro-batch, and again in parts if it fails; returns the results in order. ``named``: how many samples
        that DALI names may still be removed, one run each.

        Raises an error for which ``is_out_of_memory`` is true when memory is short.
        """
        if not samples:
            return []
        try:
            found = self._run_segments(samples)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            bad = 0 if len(samples) == 1 else sample_of(error)
            if bad is not None and bad < len(samples) and (named or len(samples) == 1):
                self.repeated += len(samples) - 1
                failed = self._failure(samples[bad][0], error)
                rest = self._run_parts([*samples[:bad], *samples[bad + 1 :]], named - 1)
                return [*rest[:bad], failed, *rest[bad:]]
        else:
            self.size.fitted(len(samples))
            return found
        # The bad samples fail again here, each with its own error.
        self.repeated += len(samples)
        return [result for sample in samples for result in self._run_parts([sample])]

    def _run_segments(self, samples: Samples) -> list[Result]:
        known: list[Fields] = [fields for fields, _ in samples]
        params = [drawn for _, drawn in samples]
        for segment in self._segments:
            written = segment.run(known, params)
            if self.device == "cpu":
                for one in self.at.each(written):
                    check_written(segment.writes, one)
            self.at.pause()
            known = [{**fields, **one} for fields, one in zip(known, written, strict=True)]
        return [{name: fields[name] for name in self.makes} for fields in known]


def segments(pipeline: Pipeline, stages: range, *, device: str, max_batch: int, threads: int) -> list[Segment]:
    """Divides ``stages`` into segments: consecutive stages of one kind are one.

    Raises ValueError for a stage without a device implementation.
    """
    found: list[Segment] = []
    for kind, group in groupby(stages, key=lambda number: type(pipeline.stages[number].device)):
        first, *rest = group
        if pipeline.stages[first].device is None:
            raise ValueError(f"stage {pipeline.stages[first].name!r} has no device implementation")
        numbers = range(first, first + 1 + len(rest))
        made = frozenset(pipeline.written(range(stages.start, first)))
        if kind is DaliFragment:
            found.append(DaliGraph(pipeline, numbers, made, device=device, max_batch=max_batch, threads=threads))
        else:
            found.append(FunctionSegment(pipeline, numbers, made, device=device))
    return found


def _failed(stage: str | None, fields: Fields, error: Exception) -> StageError:
    failure = stage_error(stage, "device", fields, error)
    failure.__cause__ = error
    return failure
