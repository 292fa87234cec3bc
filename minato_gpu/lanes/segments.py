"""The pieces that a device executor is made of: one DALI graph, or one CuPy or torch stage.

A segment runs consecutive stages of one kind on a list of samples. With device "cpu" every segment returns NumPy
arrays; on CUDA it returns what its library made (objects with ``__dlpack__``). DALI, CuPy and torch are imported
by the first run.

A value that already lies on a CUDA device enters a DALI graph by way of the host. That happens in pipelines that
go back from CuPy or torch to DALI, and when a failed micro-batch is run again stage by stage.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from minato_gpu.pipeline import Pipeline
from minato_gpu.stages import CupyFunction, DaliFragment, Stage, TorchFunction

Batch = Sequence[Mapping[str, Any]]
Drawn = Sequence[Mapping[int, Mapping[str, Any]]]


class Segment(Protocol):
    """Consecutive stages that run as one; ``stages`` holds their numbers in the pipeline.

    ``builds``: how often ``run`` has had to build something first. ``stream``: the CUDA stream on which results are to
    be ready, None to wait for them on the host.
    """

    stages: range
    builds: int
    stream: Any

    def run(self, batch: Batch, drawn: Drawn) -> list[dict[str, Any]]:
        """The fields written for each sample; ``drawn`` holds each sample's parameters by stage number."""
        ...

    def load(self) -> None:
        """Import what ``run`` will need."""
        ...

    def close(self) -> None:
        """Let go of memory and threads. Idempotent; a later ``run`` builds them again."""
        ...


def segments(
    pipeline: Pipeline, stages: range, *, device: str, max_batch: int, threads: int, fuse: bool = True
) -> list[Segment]:
    """The segments that run ``stages`` in turn; ``fuse`` joins consecutive DALI stages in one graph.

    Raises ValueError for a stage without a device implementation.
    """
    found: list[Segment] = []
    for numbers in _groups(pipeline, stages, fuse):
        if isinstance(pipeline.stages[numbers.start].device, DaliFragment):
            found.append(DaliGraph(pipeline, numbers, device=device, max_batch=max_batch, threads=threads))
        else:
            found.append(FunctionSegment(pipeline, numbers, device=device))
    return found


def _groups(pipeline: Pipeline, stages: range, fuse: bool) -> Iterator[range]:
    begin = stages.start
    for number in stages:
        stage = pipeline.stages[number]
        if stage.device is None:
            raise ValueError(f"stage {stage.name!r} has no device implementation")
        following = pipeline.stages[number + 1].device if number + 1 < stages.stop else None
        if fuse and isinstance(stage.device, DaliFragment) and isinstance(following, DaliFragment):
            continue
        yield range(begin, number + 1)
        begin = number + 1


def to_numpy(value: Any) -> Any:
    """``value`` (NumPy, DALI, CuPy or torch) as a NumPy array; a view where it lies on the host already."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value
    for to_host in ("as_cpu", "cpu", "get"):  # DALI on a device, torch, CuPy
        if hasattr(value, to_host):
            return np.asarray(getattr(value, to_host)())
    return np.asarray(value)


class DaliGraph:
    """Consecutive DALI fragments as one DALI pipeline, fed with lists of any length up to ``max_batch``.

    Built by the first run, when the names of the drawn parameters are known. DALI declares a pipeline invalid
    once it has failed, so after an exception the next run builds a new one.
    """

    def __init__(self, pipeline: Pipeline, stages: range, *, device: str, max_batch: int, threads: int) -> None:
        self.stages = stages
        self.builds = 0
        self.stream: Any = None
        self._members: tuple[Stage, ...] = pipeline.stages[stages.start : stages.stop]
        self._known = pipeline.fields_at(stages.start)
        self._device, self._max_batch, self._threads = device, max_batch, threads
        self._reads, self._writes = _boundary(self._members)
        self._sources: dict[str, tuple[int, str]] = {}  # input of the graph -> stage, drawn parameter
        self._inputs: frozenset[str] = frozenset()
        self._graph: Any = None

    def run(self, batch: Batch, drawn: Drawn) -> list[dict[str, Any]]:
        """See Segment. Raises RuntimeError, from DALI, when any sample of the batch fails."""
        if self._graph is None:
            self.builds += 1
            self._graph = self._build(drawn[0])
        try:
            outputs = self._graph.run(self.stream, **self._feed(batch, drawn))
        except BaseException as error:
            self.close()
            # DALI's frames hold the graph: whoever kept the error would keep its threads and memory.
            raise error.with_traceback(None) from None
        columns = [[output[n] for n in range(len(batch))] for output in outputs]
        if self._device == "cpu":
            columns = [[np.asarray(tensor) for tensor in column] for column in columns]
        return [dict(zip(self._writes, row, strict=True)) for row in zip(*columns, strict=True)]

    def load(self) -> None:
        """See Segment."""
        importlib.import_module("nvidia.dali.fn")

    def close(self) -> None:
        """See Segment."""
        self._graph = None

    def _feed(self, batch: Batch, drawn: Drawn) -> dict[str, list[Any]]:
        feed = {}
        for n, name in enumerate(self._reads):
            declared = np.dtype(self._known[name].dtype)
            dtype = None if declared == np.dtype(object) else declared
            feed[f"field{n}"] = [_plain(fields[name], dtype) for fields in batch]
        for source, (number, key) in self._sources.items():
            feed[source] = [_plain(params[number][key]) for params in drawn]
        return {source: values for source, values in feed.items() if source in self._inputs}

    def _build(self, params: Mapping[int, Mapping[str, Any]]) -> Any:
        dali = importlib.import_module("nvidia.dali")
        importlib.import_module("nvidia.dali.fn")
        graph = dali.Pipeline(
            batch_size=self._max_batch,
            num_threads=self._threads,
            device_id=device_number(self._device),
            exec_dynamic=True,
            prefetch_queue_depth=1,
        )
        with graph:
            known = {name: self._source(dali, n, name) for n, name in enumerate(self._reads)}
            for number, stage in zip(self.stages, self._members, strict=True):
                known.update(self._add(dali, number, stage, known, params[number]))
            graph.set_outputs(*(known[name] for name in self._writes))
        graph.build()
        fields = [f"field{n}" for n in range(len(self._reads))]
        self._inputs = frozenset(source for source in (*fields, *self._sources) if _is_input(graph, source))
        return graph

    def _source(self, dali: Any, position: int, name: str) -> Any:
        declared = self._known[name]
        options: dict[str, Any] = {"layout": declared.layout} if declared.layout else {}
        if declared.dtype != np.dtype(object):
            options["ndim"] = len(declared.shape)
        return dali.fn.external_source(name=f"field{position}", **options)

    def _add(
        self, dali: Any, number: int, stage: Stage, known: Mapping[str, Any], params: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        fragment = stage.device
        assert isinstance(fragment, DaliFragment)
        on_gpu = self._device != "cpu"
        reads = {name: known[name] for name in stage.reads}
        if on_gpu:
            reads = {n: node if n in fragment.host_reads else node.gpu() for n, node in reads.items()}
        nodes = {}
        for position, key in enumerate(params):
            source = f"stage{number}_draw{position}"
            self._sources[source] = (number, key)
            nodes[key] = dali.fn.external_source(name=source)
        written = fragment.build(dali, reads, nodes, "gpu" if on_gpu else "cpu")
        if written.keys() != stage.writes.keys():
            raise ValueError(
                f"stage {stage.name!r}: its DALI fragment made {sorted(written)}, declared {sorted(stage.writes)}"
            )
        return written


class FunctionSegment:
    """One CuPy or torch stage, run sample by sample: over NumPy or CPU tensors where the device is "cpu"."""

    builds = 0

    def __init__(self, pipeline: Pipeline, stages: range, *, device: str) -> None:
        self.stages = stages
        self.stream: Any = None
        self._stage = pipeline.stages[stages.start]
        self._device = device

    def run(self, batch: Batch, drawn: Drawn) -> list[dict[str, Any]]:
        """See Segment."""
        number = self.stages.start
        return [self._one(fields, params[number]) for fields, params in zip(batch, drawn, strict=True)]

    def load(self) -> None:
        """See Segment."""
        if not isinstance(self._stage.device, CupyFunction):
            importlib.import_module("torch")
        elif self._device != "cpu":
            importlib.import_module("cupy")

    def close(self) -> None:
        """See Segment."""

    def _one(self, fields: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        reads = {name: fields[name] for name in self._stage.reads}
        how = self._stage.device
        if isinstance(how, CupyFunction):
            xp = importlib.import_module("numpy" if self._device == "cpu" else "cupy")
            written = how.function(xp, {n: _on_device(xp, v) for n, v in reads.items()}, params)
        else:
            assert isinstance(how, TorchFunction)
            torch = importlib.import_module("torch")
            written = how.function({n: _as_tensor(torch, v, self._device) for n, v in reads.items()}, params)
        return {name: to_numpy(value) if self._device == "cpu" else value for name, value in written.items()}


def _on_device(xp: Any, value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return xp.asarray(value)
    return xp.from_dlpack(value) if hasattr(value, "__dlpack__") else value


def _as_tensor(torch: Any, value: Any, device: str) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        # A copy, because torch refuses read-only and mirrored arrays, and the function may work in place.
        return torch.tensor(_plain(value), device=device)
    return torch.from_dlpack(value) if hasattr(value, "__dlpack__") else value


def _is_input(graph: Any, source: str) -> bool:
    # DALI removes inputs that no output depends on, and then refuses to be fed them.
    try:
        graph.input_feed_count(source)
    except KeyError:
        return False
    return True


def device_number(device: str) -> int | None:
    """The number of a CUDA device, or None for "cpu". ValueError for anything else."""
    kind, _, number = device.partition(":")
    if kind == "cpu" and not number:
        return None
    if kind == "cuda" and (number.isdecimal() or not number):
        return int(number or 0)
    raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}")


def _plain(value: Any, dtype: npt.DTypeLike | None = None) -> Any:
    return np.asarray(to_numpy(value), dtype, order="C")


def _boundary(stages: Sequence[Stage]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields that a run of stages takes from outside, and those that it writes."""
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    for stage in stages:
        reads.update(dict.fromkeys(name for name in stage.reads if name not in writes))
        writes.update(dict.fromkeys(stage.writes))
    return tuple(reads), tuple(writes)
