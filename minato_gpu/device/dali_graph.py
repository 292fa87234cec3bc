"""Runs consecutive DALI stages as one DALI pipeline (``DaliGraph``), fed with micro-batches.

Holding the interpreter lock stops the training loop, so the following keep it short:
- Inputs are fed without a copy (``no_copy``) and held until their run has ended: copying 64 inputs of 500 KB held the
  lock for 6 to 23 ms. DALI gets one list per input; small arrays of one shape are stacked first, which takes a
  hundredth of the time of a tensor per sample. (Inputs on the device are copied there by DALI, which takes no list of
  separate arrays without a copy.)
- Building holds the lock for 2 to 60 ms, so a graph is built while its lane opens, before there is a sample: fragments
  ask for drawn parameters by name, which tells the graph's inputs. A fragment that needs all names waits for a sample.
  Rejected: building in a thread, which hides nothing; in another process, which cannot hand a graph over; by DALI's C
  interface, whose graphs Python cannot feed.
- The next micro-batch is fed and scheduled while the device is at one (``ahead``), so that the decoder does not wait
  for the host: on an H200 its JPEG engine was busy 43 % of the time without that, and 91 % under DALI's own iterator.
  Outputs come in the order of the runs, each with its own error.
- Where nvJPEG's engine may write too early (``nvjpeg.decoding_waits``), the host waits for the stream before each run
  of a graph that decodes, so that no work in progress reads memory that DALI gives to the decoder. Then nothing is
  scheduled ahead.
- A graph is used again after an error of one of its operators, although DALI then calls it "no longer valid". With
  ``exec_dynamic`` an error belongs to one run: it reaches the outputs after all operators before them have ended, so
  that run's inputs are consumed and the next run gets its own (``executor2/exec_node_task.cc``, ``OpTask::Run``; the
  tests run some hundred broken batches between whole ones). An error of an input operator is different: an input may
  still be queued, and would be given to the next run. Then the graph is rebuilt; so it is when ``_FAILURE_LIMIT`` runs
  in a row failed (twice as many the next time, since rebuilding stops the training loop, too).
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from minato_gpu.device import nvjpeg
from minato_gpu.device.accelerator import HeldUntilPassed, Stream, await_stream, gpu_name
from minato_gpu.device.dali_outputs import Output, on_device, on_host
from minato_gpu.device.segments import Segment
from minato_gpu.device.values import Batch, Drawn, as_tensor, plain
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.pipeline.stages import DaliFragment, Stage
from minato_gpu.samples import Value, add_note

_DECODERS = (b"decoders__Image", b"ImageDecoder")  # operator names in a graph's definition, current and former
_FAILED_OPERATOR = re.compile(r"Error in \w+ operator `([^`]+)`")
_FAILED_SAMPLE = re.compile(r"Failed to decode sample #(\d+)")
_STACKED = 1024  # bytes of an input up to which a micro-batch is stacked into one block
_FAILURE_LIMIT = 32  # failed runs in a row after which the graph is rebuilt; doubles each time


Graph = Value
"""A built DALI ``Pipeline`` with dynamic execution: ``outputs`` returns those of the oldest run not asked for yet."""


class ScheduledRun:
    """A run that DALI has started, with the inputs that it reads."""

    __slots__ = ("drawn", "error", "fed", "graph", "outputs")

    def __init__(self, graph: Graph, fed: object, drawn: Drawn) -> None:
        self.graph: Graph | None = graph  # None once asked for
        self.fed, self.drawn = fed, drawn
        self.outputs: Sequence[Output] | None = None  # these two once asked for
        self.error: BaseException | None = None

    def ask(self, stream: Stream | None) -> None:
        """Waits for the run's ``outputs`` or ``error``, and sets it; does nothing the second time. Runs must be asked
        in the order in which they were scheduled."""
        if self.graph is None:
            return
        try:
            self.outputs = self.graph.outputs(stream)
        except BaseException as error:
            self.error = error.with_traceback(None)
        self.graph = None


class DaliGraph(Segment):
    """Segment of consecutive DALI fragments as one DALI pipeline; takes up to ``max_batch`` samples at once.

    ``device``: "cpu" or "cuda:N"; ``threads``: DALI's on the CPU.
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
        super().__init__(pipeline, stages, made, device)
        self.builds = 0  # graphs built so far
        self.runs = 0
        self._known = pipeline.fields_at(stages.start)
        self._max_batch, self._threads = max_batch, threads
        by_host = {name for stage in self._members for name in getattr(stage.device, "host_reads", ())}
        # inputs that an earlier segment left on the device
        self._resident = frozenset() if device == "cpu" else made.intersection(self._reads).difference(by_host)
        self._names: dict[int, tuple[str, ...] | None] = {}  # names of drawn parameters by stage; None: unknown
        self._sources: dict[str, tuple[int, str]] = {}  # input of the graph -> stage, drawn parameter
        self._inputs: frozenset[str] = frozenset()
        self._graph: Graph | None = None
        self._ahead: ScheduledRun | None = None  # the next micro-batch's
        self._waits_for_stream = False  # before each run of this graph
        self._held = HeldUntilPassed()
        self._failures = 0  # runs in a row
        self._failure_limit = _FAILURE_LIMIT  # after so many the graph is rebuilt

    def run(self, batch: Batch, drawn: Drawn) -> list[dict[str, Value]]:
        """Runs a micro-batch, or takes its outputs if it was scheduled ahead; builds the graph if there is none.

        Raises RuntimeError, from DALI, when any sample fails, and what a fragment raises while the graph is built.
        """
        self._enter(drawn)
        self.sweep()
        run = self._take_scheduled(drawn)
        if run is None:
            if not self.built:
                self.build(drawn[0])
                self._enter(drawn)  # building is not part of the samples' step
            run = self._schedule(batch, drawn)
        self.at.scheduled()
        run.ask(self.stream)
        if run.error is not None:
            self._fail(run.error, run.fed)
        assert run.outputs is not None
        self._failures, self._failure_limit = 0, _FAILURE_LIMIT
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
        """Schedules a micro-batch behind the current one; ``run`` must be called next with the same objects in
        ``drawn``.

        Returns False on the CPU, without a graph, while another is scheduled ahead, where the host must wait before
        each run, and when feeding fails: ``run`` then feeds it.
        """
        if self._device == "cpu" or self._waits_for_stream or self._ahead is not None or not self.built:
            return False
        with contextlib.suppress(Exception):
            self._ahead = self._schedule(batch, drawn)
        return self._ahead is not None

    def forget(self) -> None:
        """Waits for what was scheduled ahead, if anything, and drops it."""
        run, self._ahead = self._ahead, None
        if run is not None:
            run.ask(self.stream)
            self._keep(run.outputs, run.fed)

    def _take_scheduled(self, drawn: Drawn) -> ScheduledRun | None:
        """Returns the run scheduled ahead for these samples; None where there is none. A run for other samples is asked
        for its outputs first, because DALI answers in order."""
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

    def _schedule(self, batch: Batch, drawn: Drawn) -> ScheduledRun:
        fed = self._feed(batch, drawn)
        self.runs += 1
        assert self._graph is not None
        try:
            for source, values in fed.items():
                self.at.pause()
                self._graph.feed_input(source, values)
            self.at.pause()
            if self._waits_for_stream and self.stream is not None:
                await_stream(self.stream)
                self.at.pause()  # the previous micro-batch has ended
            self._graph.schedule_run()
        except BaseException as error:
            self._fail(error, fed)
        return ScheduledRun(self._graph, fed, drawn)

    def _fail(self, error: BaseException, fed: object) -> NoReturn:
        """Counts a failed run, rebuilds the graph if it cannot be trusted, and raises the error."""
        self._failures += 1
        if self.stream is not None:
            self._held.hold(None, fed)
        suspect = self._failures >= self._failure_limit
        if suspect:
            self._failure_limit += self._failures
        if suspect or not leaves_graph_usable(error):
            self._rebuild()
        # DALI's frames hold the graph: an error that is kept would keep its threads and memory.
        raise error.with_traceback(None) from None

    def _keep(self, *things: object) -> None:
        """Holds what the device may still read until it has passed this point of the stream."""
        if self.stream is not None:
            self._held.hold(self.stream.record_event(), *things)

    def sweep(self) -> None:
        """Frees what the device has finished reading; never waits."""
        self._held.sweep()

    @property
    def built(self) -> bool:
        """True when ``run`` has nothing to build first."""
        return self._graph is not None

    def build(self, params: Mapping[int, Mapping[str, Value]]) -> None:
        """Builds the graph, if there is none, from the drawn parameters of any sample; from none (empty), names are
        learned as fragments ask for them. Raises NamesUnknown where a fragment needs them all, else what fragments or
        DALI raise."""
        if self._graph is None:
            self._names = {number: tuple(params[number]) if number in params else None for number in self.stages}
            self._graph = self._build()
            self.builds += 1  # after its threads exist: the lane then looks for them

    def _rebuild(self) -> None:
        """Replaces a graph that cannot be trusted, at once: a split point is only offered while its graph is built, so
        no later sample would cause it."""
        self._graph = None
        with contextlib.suppress(Exception):  # the caller raises the run's error; the next run would raise this one
            self._graph = self._build()
            self.builds += 1

    def load(self) -> None:
        importlib.import_module("nvidia.dali.fn")

    def close(self) -> None:
        """Frees memory and threads. Idempotent; a later ``run`` builds the graph again."""
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
                feed[source] = self._as_list([plain(params[number][key]) for params in drawn])
        return feed

    def _field(self, name: str, values: list[Value]) -> Sequence[object]:
        if name in self._resident:  # DALI takes no strided arrays
            return [as_tensor(value, self._device).contiguous() for value in self.at.each(values)]
        declared = self._known[name]
        dtype = None if declared.dtype == np.dtype(object) else np.dtype(declared.dtype)
        return self._as_list([plain(value, dtype) for value in self.at.each(values)])

    def _as_list(self, arrays: Sequence[npt.NDArray[Value]]) -> Sequence[object]:
        """Returns arrays as a DALI list that keeps their memory: one block where they are small and of one shape."""
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
            device_id=None if self._device == "cpu" else torch.device(self._device).index or 0,
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
        self._inputs = frozenset(source for source in (*fields, *self._sources) if _is_input(graph, source))
        self._waits_for_stream = (
            self._device != "cpu" and _decodes(graph) and nvjpeg.decoding_waits(gpu_name(self._device))
        )
        return graph

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
        nodes = LazyInputs(source) if names is None else {key: source(key) for key in names}
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
    """Raised when a fragment needs the names of all drawn parameters before there is a sample."""


class LazyInputs(Mapping[str, Value]):
    """Mapping that makes the input node of a drawn parameter when a fragment asks for it by name."""

    def __init__(self, make: Callable[[str], Value]) -> None:
        self._make = make
        self._made: dict[str, Value] = {}

    def __getitem__(self, key: str) -> Value:
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def get(self, key: str, default: Value = None) -> Value:
        raise NamesUnknown

    def __contains__(self, key: object) -> bool:
        raise NamesUnknown

    def __iter__(self) -> Iterator[str]:
        raise NamesUnknown

    def __len__(self) -> int:
        raise NamesUnknown


def _decodes(graph: Graph) -> bool:
    """Returns True when a graph decodes images, or cannot be serialised because it holds Python functions."""
    try:
        definition = graph.serialize()
    except RuntimeError:
        return True
    return any(name in definition for name in _DECODERS)


def _is_input(graph: Graph, source: str) -> bool:
    """Returns whether the graph has this input: DALI removes inputs on which no output depends and refuses to be fed
    them."""
    try:
        graph.input_feed_count(source)
    except KeyError:
        return False
    return True


def leaves_graph_usable(error: BaseException) -> bool:
    """Returns True when the error is that of an operator other than the graph's inputs."""
    found = _FAILED_OPERATOR.search(str(error)) if isinstance(error, RuntimeError) else None
    return found is not None and "external" not in found[1].lower()


def sample_of(error: BaseException) -> int | None:
    """Returns the number, in its micro-batch, of the sample that a decoder rejected; None where the error names
    none."""
    found = _FAILED_SAMPLE.search(str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else int(found[1])
