"""Consecutive DALI stages as one DALI pipeline, fed with lists of samples."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minato_gpu.lanes.at import At
from minato_gpu.lanes.values import as_tensor, device_number, plain
from minato_gpu.pipeline import Pipeline
from minato_gpu.stages import DaliFragment, Stage

Batch = Sequence[Mapping[str, Any]]
Drawn = Sequence[Mapping[int, Mapping[str, Any]]]


class DaliGraph:
    """Consecutive DALI fragments as one DALI pipeline, fed with lists of any length up to ``max_batch``.

    Built by the first run, when the names of the drawn parameters are known. DALI declares a pipeline invalid
    once it has failed, so after an exception the next run builds a new one.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stages: range,
        made: frozenset[str] = frozenset(),
        *,
        device: str,
        max_batch: int,
        threads: int,
    ) -> None:
        self.stages = stages
        self.builds = 0
        self.stream: Any = None
        self.at = At()
        self._members: tuple[Stage, ...] = pipeline.stages[stages.start : stages.stop]
        self._known = pipeline.fields_at(stages.start)
        self._device, self._max_batch, self._threads = device, max_batch, threads
        self._reads, self._writes = _boundary(self._members)
        by_host = {name for stage in self._members for name in getattr(stage.device, "host_reads", ())}
        self._resident = frozenset() if device == "cpu" else made.intersection(self._reads).difference(by_host)
        self._sources: dict[str, tuple[int, str]] = {}  # input of the graph -> stage, drawn parameter
        self._inputs: frozenset[str] = frozenset()
        self._graph: Any = None
        self._building = threading.Lock()

    def run(self, batch: Batch, drawn: Drawn) -> list[dict[str, Any]]:
        """See Segment. Raises RuntimeError, from DALI, when any sample of the batch fails."""
        self._enter(drawn)
        built = self.built
        self.build(drawn[0])
        if not built:
            self._enter(drawn)  # what it takes to build is no sample's
        try:
            outputs = self._graph.run(self.stream, **self._feed(batch, drawn))
        except BaseException as error:
            self.close()
            # DALI's frames hold the graph: whoever kept the error would keep its threads and memory.
            raise error.with_traceback(None) from None
        columns: list[Sequence[Any]]
        if self._device == "cpu":
            columns = [[np.asarray(output[n]) for n in range(len(batch))] for output in outputs]
        else:
            torch = importlib.import_module("torch")
            columns = [rows(torch, output) for output in outputs]
        return [dict(zip(self._writes, row, strict=True)) for row in zip(*columns, strict=True)]

    def _enter(self, drawn: Drawn) -> None:
        self.at.enter(self.stages.start, drawn[0] if len(drawn) == 1 else None, len(drawn))

    @property
    def built(self) -> bool:
        """See Segment."""
        return self._graph is not None

    def build(self, params: Mapping[int, Mapping[str, Any]]) -> None:
        """See Segment."""
        with self._building:
            if self._graph is None:
                self._graph = self._build(params)
                self.builds += 1  # not before its threads are there: whoever sees it looks for them

    def load(self) -> None:
        """See Segment."""
        importlib.import_module("nvidia.dali.fn")

    def close(self) -> None:
        """See Segment."""
        self._graph = None

    def _feed(self, batch: Batch, drawn: Drawn) -> dict[str, list[Any]]:
        feed = {}
        for n, name in enumerate(self._reads):
            if name in self._resident:
                torch = importlib.import_module("torch")  # DALI takes nothing strided
                feed[f"field{n}"] = [as_tensor(torch, fields[name], self._device).contiguous() for fields in batch]
                continue
            declared = np.dtype(self._known[name].dtype)
            dtype = None if declared == np.dtype(object) else declared
            feed[f"field{n}"] = [plain(fields[name], dtype) for fields in batch]
        for source, (number, key) in self._sources.items():
            feed[source] = [plain(params[number][key]) for params in drawn]
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
        if name in self._resident:
            options["device"] = "gpu"
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
            stay = {*fragment.host_reads, *self._resident}
            reads = {n: node if n in stay else node.gpu() for n, node in reads.items()}
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


def rows(torch: Any, output: Any) -> Sequence[Any]:
    """The samples of a graph's output: of one shape, as the rows of one torch tensor, so that they are handed over at
    once, and not one by one for ten microseconds each; else as DALI's tensors."""
    if len(output) and output.is_dense_tensor():
        found: Sequence[Any] = torch.from_dlpack(output.as_tensor()).unbind(0)
        return found
    return [output[n] for n in range(len(output))]


def _is_input(graph: Any, source: str) -> bool:
    # DALI removes inputs that no output depends on, and then refuses to be fed them.
    try:
        graph.input_feed_count(source)
    except KeyError:
        return False
    return True


def _boundary(stages: Sequence[Stage]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields that a run of stages takes from outside, and those that it writes."""
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    for stage in stages:
        reads.update(dict.fromkeys(name for name in stage.reads if name not in writes))
        writes.update(dict.fromkeys(stage.writes))
    return tuple(reads), tuple(writes)
