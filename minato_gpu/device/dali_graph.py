"""Consecutive DALI stages as one DALI pipeline, fed with micro-batches.

What holds the interpreter lock stops the training loop, so little here does:
- Inputs are fed without a copy (``no_copy``) and held until the run that reads them has ended. A copy of 64 inputs of
  500 KB held the lock for 6 to 23 ms. DALI gets one list for each input: what is small and alike is stacked before,
  which takes a hundredth of the time that a tensor for each sample takes. (What the device itself has made is copied
  there, by DALI: it takes no list of separate arrays without a copy.)
- ``build`` holds the lock for as long as DALI builds, 2 to 60 ms. So a graph is built before there is a sample, while
  its lane opens: which parameters are drawn is learned from the fragments, as they ask for them by name. A fragment
  that wants to see all names at once waits for a sample. Rejected: building in a thread beside batches that are being
  delivered, which hides nothing; in another process, which cannot hand a graph over; through DALI's C interface, whose
  graphs Python cannot feed.
- While the device is at a micro-batch the next one is fed and scheduled behind it (``ahead``), so that the decoder need
  not wait for the host: on an H200 its JPEG engine was at work for 43 % of the time without that, and for 91 % under
  DALI's own iterator. Outputs come in the order of the runs, each with its own error.
- Before a run of a graph that decodes the host waits for the stream, where nvJPEG's engine may write too early
  (``nvjpeg.decoding_waits``): no work that is under way reads memory that DALI may give to the decoder. Then nothing is
  scheduled ahead.
- A graph outlives the errors of its operators (``dali_errors``); it is built anew where its inputs have failed, or
  where nothing else has come of it for so long that the graph itself is under suspicion. That stops the training loop
  too, and there is no other way to go on; so it gets the rarer the more has failed, as of a folder of broken files.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from minato_gpu.device import nvjpeg
from minato_gpu.device.accelerator import Stream, await_stream, gpu_name
from minato_gpu.device.dali_errors import leaves_graph_usable
from minato_gpu.device.dali_outputs import HeldUntilRead, Output, on_device, on_host
from minato_gpu.device.segments import Segment
from minato_gpu.device.values import Batch, Drawn, as_tensor, device_number, plain
from minato_gpu.pipeline import Pipeline
from minato_gpu.samples import Value, add_note
from minato_gpu.stages import DaliFragment, Stage

_DECODERS = (b"decoders__Image", b"ImageDecoder")  # in a graph's definition, today's and the former
_STACKED = 1024  # bytes of an input up to which those of a micro-batch are copied into one block
_SUSPECT = 32  # runs that fail, and none between them that does not, cost a graph; then twice as many, and so on


class Graph(Protocol):
    """A built ``Pipeline`` with dynamic execution."""

    def feed_input(self, source: str, values: Sequence[object]) -> None:
        """The samples of an input, for the next run."""

    def schedule_run(self) -> None:
        """Begin a run on what was fed; several may be under way."""

    def outputs(self, stream: Stream | None) -> Sequence[Output]:
        """Those of the oldest run whose outputs nobody has had; waits until the host's part of it is done."""

    def input_feed_count(self, source: str) -> int:
        """How many batches of an input a run needs first. KeyError where it has no such input."""

    def serialize(self) -> bytes:
        """The graph's definition, with the names of its operators."""


class Scheduled:
    """A run that DALI is at, and what it reads. ``outputs`` or ``error``: once they were asked for."""

    __slots__ = ("drawn", "error", "fed", "graph", "outputs")

    def __init__(self, graph: Graph, fed: object, drawn: Drawn) -> None:
        self.graph: Graph | None = graph
        self.fed, self.drawn = fed, drawn
        self.outputs: Sequence[Output] | None = None
        self.error: BaseException | None = None

    def ask(self, stream: Stream | None) -> None:
        """Wait for the outputs, in the order in which runs were scheduled; the graph is let go of."""
        if self.graph is None:
            return
        try:
            self.outputs = self.graph.outputs(stream)
        except BaseException as error:
            self.error = error.with_traceback(None)
        self.graph = None


class DaliGraph(Segment):
    """Consecutive DALI fragments as one DALI pipeline, fed with lists of any length up to ``max_batch``."""

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
        super().__init__(pipeline, stages, made, device)
        self.runs = 0
        self._known = pipeline.fields_at(stages.start)
        self._max_batch, self._threads = max_batch, threads
        by_host = {name for stage in self._members for name in getattr(stage.device, "host_reads", ())}
        self._resident = frozenset() if device == "cpu" else made.intersection(self._reads).difference(by_host)
        self._names: dict[int, tuple[str, ...] | None] = {}  # of drawn parameters, by stage, where they are known
        self._sources: dict[str, tuple[int, str]] = {}  # input of the graph -> stage, drawn parameter
        self._inputs: frozenset[str] = frozenset()
        self._graph: Graph | None = None
        self._ahead: Scheduled | None = None  # the next micro-batch's
        self._waits = False  # for the stream, before each run of this graph
        self._held = HeldUntilRead()
        self._failed = 0  # runs, since one did not
        self._suspect = _SUSPECT  # so many of them cost the next graph

    def run(self, batch: Batch, drawn: Drawn) -> list[dict[str, Value]]:
        """See Segment. Raises RuntimeError, from DALI, when any sample of the batch fails."""
        self._enter(drawn)
        self.sweep()
        run = self._scheduled_before(drawn)
        if run is None:
            if not self._takes(drawn[0]):
                self._graph = None
            if not self.built:
                self.build(drawn[0])
                self._enter(drawn)  # what it takes to build is no sample's
            run = self._schedule(batch, drawn)
        self.at.scheduled()
        run.ask(self.stream)
        if run.error is not None:
            self._fail(run.error, run.fed)
        assert run.outputs is not None
        self._failed, self._suspect = 0, _SUSPECT
        columns: list[Sequence[Value]]
        if self._device == "cpu":
            columns = [list(self.at.each(on_host(output))) for output in run.outputs]
        else:
            try:
                columns = [on_device(output, self._device, self.stream) for output in run.outputs]
            finally:
                self._keep(run.outputs, run.fed)
        self.at.pause()
        return [dict(zip(self.writes, row, strict=True)) for row in zip(*columns, strict=True)]

    def ahead(self, batch: Batch, drawn: Drawn) -> bool:
        """See Segment. Not where the host must wait before a run; what fails to be fed is fed again in its turn."""
        if self._device == "cpu" or self._waits or self._ahead is not None:
            return False
        if not (self.built and self._takes(drawn[0])):
            return False
        with contextlib.suppress(Exception):
            self._ahead = self._schedule(batch, drawn)
        return self._ahead is not None

    def forget(self) -> None:
        """See Segment."""
        run, self._ahead = self._ahead, None
        if run is not None:
            run.ask(self.stream)
            self._keep(run.outputs, run.fed)

    def _scheduled_before(self, drawn: Drawn) -> Scheduled | None:
        """The run that was scheduled ahead for these samples. One for others is asked first for what it has made: DALI
        answers in the order in which runs were scheduled."""
        run = self._ahead
        if run is None:
            return None
        if len(run.drawn) == len(drawn) and all(map(operator.is_, run.drawn, drawn)):
            self._ahead = None
            return run
        run.ask(self.stream)
        return None

    def _enter(self, drawn: Drawn) -> None:
        self.at.enter(self.stages.start, drawn[0] if len(drawn) == 1 else None, len(drawn))

    def _schedule(self, batch: Batch, drawn: Drawn) -> Scheduled:
        fed = self._feed(batch, drawn)
        self.runs += 1
        assert self._graph is not None
        try:
            for source, values in fed.items():
                self.at.pause()
                self._graph.feed_input(source, values)
            self.at.pause()
            if self._waits and self.stream is not None:
                await_stream(self.stream)
                self.at.pause()  # the micro-batch before is through
            self._graph.schedule_run()
        except BaseException as error:
            self._fail(error, fed)
        return Scheduled(self._graph, fed, drawn)

    def _fail(self, error: BaseException, fed: object) -> NoReturn:
        """A run has failed: whether the graph is to be trusted further. Raises the error."""
        self._failed += 1
        if self.stream is not None:
            self._held.hold(None, fed)
        suspect = self._failed >= self._suspect
        if suspect:
            self._suspect += self._failed
        if suspect or not leaves_graph_usable(error):
            self._renew()
        # DALI's frames hold the graph: whoever kept the error would keep its threads and memory.
        raise error.with_traceback(None) from None

    def _keep(self, *things: object) -> None:
        """What the device is still at, unless that has been waited for."""
        if self.stream is not None:
            self._held.hold(self.stream.record_event(), *things)

    def sweep(self) -> None:
        """Let go of what the device is through with; never waits."""
        self._held.sweep()

    @property
    def built(self) -> bool:
        """See Segment."""
        return self._graph is not None

    def build(self, params: Mapping[int, Mapping[str, Value]]) -> None:
        """See Segment."""
        if self._graph is None:
            self._names = {number: tuple(params[number]) if number in params else None for number in self.stages}
            self._graph = self._build()
            self.builds += 1  # not before its threads are there: whoever sees it looks for them

    def _renew(self) -> None:
        """Another graph in the place of one that is not to be trusted. At once: its split point is offered only where
        there is one, so nobody might come to build it."""
        self._graph = None
        with contextlib.suppress(Exception):  # what it was built for has its own error; the next run has this one
            self._graph = self._build()
            self.builds += 1

    def _takes(self, params: Mapping[int, Mapping[str, Value]]) -> bool:
        """Whether the sample has drawn what the fragments asked for when nobody knew what is drawn."""
        asked = self._sources.values() if self.built else ()
        return all(self._names[number] is not None or key in params[number] for number, key in asked)

    def load(self) -> None:
        """See Segment."""
        importlib.import_module("nvidia.dali.fn")

    def close(self) -> None:
        """See Segment."""
        self.forget()
        self._graph = None
        self._held.close()

    def _feed(self, batch: Batch, drawn: Drawn) -> dict[str, Sequence[object]]:
        feed: dict[str, Sequence[object]] = {}
        for n, name in enumerate(self._reads):
            source = f"field{n}"
            if source in self._inputs:
                feed[source] = self._field(name, [fields[name] for fields in batch])
        for source, (number, key) in self._sources.items():
            if source in self._inputs:
                feed[source] = self._listed([plain(params[number][key]) for params in drawn])
        return feed

    def _field(self, name: str, values: list[Value]) -> Sequence[object]:
        if name in self._resident:  # DALI takes nothing strided
            return [as_tensor(value, self._device).contiguous() for value in self.at.each(values)]
        declared = self._known[name]
        dtype = None if declared.dtype == np.dtype(object) else np.dtype(declared.dtype)
        return self._listed([plain(value, dtype) for value in self.at.each(values)])

    def _listed(self, arrays: Sequence[npt.NDArray[Value]]) -> Sequence[object]:
        """DALI's list of these, which keeps their memory: of one block where they are small and alike."""
        tensors = importlib.import_module("nvidia.dali.tensors")
        found: Sequence[object]
        first = arrays[0]
        if first.nbytes <= _STACKED and all(a.shape == first.shape and a.dtype == first.dtype for a in arrays):
            found = tensors.TensorListCPU(np.array(arrays, first.dtype))
        else:
            found = tensors.TensorListCPU([tensors.TensorCPU(array) for array in self.at.each(arrays)], None, False)
        return found

    def _build(self) -> Graph:
        self._sources = {}
        dali = importlib.import_module("nvidia.dali")
        importlib.import_module("nvidia.dali.fn")
        graph: Value = dali.Pipeline(
            batch_size=self._max_batch,
            num_threads=self._threads,
            device_id=device_number(self._device),
            exec_dynamic=True,
            prefetch_queue_depth=1,
        )
        with graph:
            known = {name: self._source(dali, n, name) for n, name in enumerate(self._reads)}
            for number, stage in zip(self.stages, self._members, strict=True):
                known.update(self._add(dali, number, stage, known))
            made = (known[name] for name in self.writes)
            graph.set_outputs(*(made if self._device == "cpu" else (node.gpu() for node in made)))
        graph.build()
        fields = [f"field{n}" for n in range(len(self._reads))]
        self._inputs = frozenset(source for source in (*fields, *self._sources) if is_input(graph, source))
        self._waits = self._device != "cpu" and _decodes(graph) and nvjpeg.decoding_waits(gpu_name(self._device))
        built: Graph = graph
        return built

    def _source(self, dali: Value, position: int, name: str) -> Value:
        declared = self._known[name]
        options: dict[str, object] = {"layout": declared.layout} if declared.layout else {}
        if name in self._resident:
            options["device"] = "gpu"
        else:
            options["no_copy"] = True
        if declared.dtype != np.dtype(object):
            options["ndim"] = len(declared.shape)
        return dali.fn.external_source(name=f"field{position}", **options)

    def _add(self, dali: Value, number: int, stage: Stage, known: Mapping[str, Value]) -> Mapping[str, Value]:
        fragment = stage.device
        assert isinstance(fragment, DaliFragment)
        on_gpu = self._device != "cpu"
        reads = {name: known[name] for name in stage.reads}
        if on_gpu:
            stay = {*fragment.host_reads, *self._resident}
            reads = {n: node if n in stay else node.gpu() for n, node in reads.items()}

        def source(key: str) -> Value:
            name = f"stage{number}_draw{sum(stage == number for stage, _ in self._sources.values())}"
            self._sources[name] = (number, key)
            return dali.fn.external_source(name=name, no_copy=True)

        names = self._names[number]
        nodes = AskedFor(source) if names is None else {key: source(key) for key in names}
        try:
            written = fragment.build(dali, reads, nodes, "gpu" if on_gpu else "cpu")
        except Exception as error:
            add_note(error, f"in the DALI fragment of stage {stage.name!r}")
            raise
        if written.keys() != stage.writes.keys():
            raise ValueError(
                f"stage {stage.name!r}: its DALI fragment made {sorted(written)}, declared {sorted(stage.writes)}"
            )
        return written


class NamesUnknown(Exception):
    """Which parameters a stage draws is not known before there is a sample."""


class AskedFor(Mapping[str, Value]):
    """The nodes of drawn parameters while nobody knows which there are: each is made when it is asked for."""

    def __init__(self, make: Callable[[str], Value]) -> None:
        self._make = make
        self._made: dict[str, Value] = {}

    def __getitem__(self, key: str) -> Value:
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def __contains__(self, key: object) -> bool:
        raise NamesUnknown

    def __iter__(self) -> Iterator[str]:
        raise NamesUnknown

    def __len__(self) -> int:
        raise NamesUnknown


def _decodes(graph: Graph) -> bool:
    """Whether a graph decodes pictures, as far as it tells: one with functions of Python's does not."""
    try:
        definition = graph.serialize()
    except RuntimeError:
        return True
    return any(name in definition for name in _DECODERS)


def is_input(graph: Graph, source: str) -> bool:
    """Whether the graph wants this input: DALI removes those that no output depends on, and refuses to be fed them."""
    try:
        graph.input_feed_count(source)
    except KeyError:
        return False
    return True
