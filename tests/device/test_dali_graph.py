"""DALI's graphs: fed without a copy, used again after an error, results that belong to nobody else.

And what DALI says of those that a GPU runs, without one: names and types of arguments, and what may lie where. The
backend, which would need the GPU, is not made.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from minato_gpu.device import nvjpeg
from minato_gpu.device.dali_graph import _FAILURE_LIMIT, DaliGraph, NamesUnknown, leaves_graph_usable, sample_of
from minato_gpu.device.dali_outputs import on_device
from minato_gpu.device.executor import segments
from minato_gpu.pipeline.pipeline import DaliFragment, Field, Pipeline, Stage
from minato_gpu.pipeline.stages import Fields, Params
from tests.device.test_segments import mixed

ENCODED, BOX, NUMBER = Field(np.uint8, (None,)), Field(np.int32, (4,)), Field(np.int32)
PIXELS = Field(np.int32, (None, None, 3))


@pytest.fixture(autouse=True)
def dali() -> Any:
    """Imported late: whoever forks after that takes longer for it."""
    return pytest.importorskip("nvidia.dali")


def cut_out(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
    box = fields["box"]
    image = dali.fn.decoders.image_slice(fields["encoded"], box[0:2], box[2:4], axes=[0, 1], device="cpu")
    return {"pixels": dali.fn.cast(image, dtype=dali.types.INT32) + 1000 * params["amount"]}


def add_one(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
    return {"number": fields["number"] + 1}


def draw(rng: np.random.Generator, meta: Fields) -> Params:
    return {"amount": np.int32(rng.integers(1, 1000))}


def unused(*_: Any) -> Any:
    raise AssertionError("not on the CPU lane")


def photographs() -> Pipeline:
    """Two stages of one graph with four inputs: three of the first, in which decoding may fail, one of the other."""
    return Pipeline(
        (
            Stage("cut", ("encoded", "box"), {"pixels": PIXELS}, unused, DaliFragment(cut_out), draw),
            Stage("count", ("number",), {"number": NUMBER}, unused, DaliFragment(add_one)),
        ),
        outputs=("pixels", "number"),
        inputs={"encoded": ENCODED, "box": BOX, "number": NUMBER},
    )


def graph_of(pipeline: Pipeline) -> DaliGraph:
    return DaliGraph(pipeline, range(len(pipeline.stages)), device="cpu", max_batch=16, threads=1)


@pytest.fixture
def graph() -> Iterator[DaliGraph]:
    one = graph_of(photographs())
    yield one
    one.close()


class Photographs:
    """Samples of 16 photographs, numbered through."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.count = 0
        self.encoded = [self._encoded(60 + n) for n in range(16)]

    def _encoded(self, height: int) -> Any:
        return cv2.imencode(".jpg", self.rng.integers(0, 255, (height, 80, 3), np.uint8))[1].reshape(-1)

    def some(self, count: int) -> tuple[list[dict[str, Any]], list[dict[int, Any]]]:
        """So many samples, of boxes of various heights, and their draws."""
        batch, drawn = [], []
        for n in range(count):
            self.count += 1
            box = np.array([0, 0, 5 + n, 20], np.int32)
            encoded = self.encoded[int(self.rng.integers(16))]
            batch.append({"encoded": encoded, "box": box, "number": np.int32(self.count)})
            drawn.append({0: {"amount": np.int32(self.count)}, 1: {}})
        return batch, drawn

    @staticmethod
    def check(batch: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
        """Each sample has its own box, number and draw."""
        for fields, made in zip(batch, results, strict=True):
            assert made["number"] == fields["number"] + 1
            assert made["pixels"].shape == (fields["box"][2], 20, 3)
            assert (made["pixels"] // 1000 == fields["number"]).all()


def spoil(fields: dict[str, Any], how: int) -> None:
    """A file that is none, one that ends too early, a box that lies outside."""
    if how == 0:
        fields["encoded"] = np.arange(5000, dtype=np.uint8)
    elif how == 1:
        fields["encoded"], fields["box"] = fields["encoded"][:300], np.array([0, 0, 50, 20], np.int32)
    else:
        fields["box"] = np.array([1000, 1000, 5, 5], np.int32)


def test_a_graph_that_has_failed_gives_each_sample_its_own_afterwards(graph: DaliGraph) -> None:
    """On which a sample's content depends (P2): were an input of a failed run left over, the next samples had it."""
    samples = Photographs()
    failed = 0
    for number in range(120):
        batch, drawn = samples.some(int(samples.rng.integers(1, 17)))
        if number % 3:
            spoil(batch[int(samples.rng.integers(len(batch)))], number % 5 % 3)
            with pytest.raises(RuntimeError, match="no longer valid"):
                graph.run(batch, drawn)
            failed += 1
        else:
            samples.check(batch, graph.run(batch, drawn))
    assert failed == 80 and graph.builds == 1


def test_a_graph_that_does_nothing_but_fail_is_built_anew(graph: DaliGraph) -> None:
    """The rarer the more fails: to build stops the training loop."""
    samples, builds = Photographs(), list[int]()
    for _ in range(4 * _FAILURE_LIMIT):
        batch, drawn = samples.some(1)
        spoil(batch[0], 0)
        with contextlib.suppress(RuntimeError):
            graph.run(batch, drawn)
        builds.append(graph.builds)
    assert [builds.index(count) + 1 for count in (1, 2, 3, 4)] == [
        1,
        _FAILURE_LIMIT,
        2 * _FAILURE_LIMIT,
        4 * _FAILURE_LIMIT,
    ]
    assert graph.built
    batch, drawn = samples.some(1)
    samples.check(batch, graph.run(batch, drawn))
    assert graph._failure_limit == _FAILURE_LIMIT


def test_inputs_are_held_until_the_run_has_ended(graph: DaliGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that were made for it, which nobody else holds."""
    samples = Photographs()
    batch, drawn = samples.some(4)
    graph.build(drawn[0])
    assert graph._graph is not None
    feed, outputs = graph._feed, graph._graph.outputs
    fed: list[weakref.ref[Any]] = []
    held: list[bool] = []

    def noted(*given: Any) -> Any:
        found = feed(*given)
        fed.extend(map(weakref.ref, found.values()))
        return found

    def checked(stream: Any) -> Any:
        held.extend(ref() is not None for ref in fed)
        return outputs(stream)

    monkeypatch.setattr(graph, "_feed", noted)
    monkeypatch.setattr(graph._graph, "outputs", checked)
    samples.check(batch, graph.run(batch, drawn))
    assert held == [True] * 4
    assert all(ref() is None for ref in fed), "and no longer"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("how", ["same", "reshaped"])
@pytest.mark.parametrize("size", [6, 600])
def test_results_share_no_memory_with_inputs(count: int, how: str, size: int) -> None:
    """An operator may hand through what it is given, which is its sender's."""

    def through(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
        return {"row": fields["row"] if how == "same" else dali.fn.reshape(fields["row"], shape=[size])}

    row = Field(np.float32, (size,))
    stage = Stage("through", ("row",), {"row": row}, unused, DaliFragment(through))
    graph = graph_of(Pipeline((stage,), outputs=("row",), inputs={"row": row}))
    rows = [np.full(size, n, np.float32) for n in range(count)]
    results = graph.run([{"row": one} for one in rows], [{0: {}}] * count)
    for one in rows:
        one[:] = -1
    assert [result["row"].tolist() for result in results] == [[float(n)] * size for n in range(count)]
    graph.close()


ROW = Field(np.float32, (3,))


def drawing(build: Any) -> DaliGraph:
    stage = Stage("draws", ("row",), {"row": ROW}, unused, DaliFragment(build), draw)
    return graph_of(Pipeline((stage,), outputs=("row",), inputs={"row": ROW}))


def added(graph: DaliGraph, **params: int) -> list[float]:
    (result,) = graph.run([{"row": np.zeros(3, np.float32)}], [{0: {k: np.int32(n) for k, n in params.items()}}])
    found: list[float] = result["row"].tolist()
    return found


def test_a_fragment_that_can_do_without_a_parameter_waits_for_a_sample() -> None:
    """Before that nobody knows whether it is drawn."""

    def build(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
        return {"row": fields["row"] + params.get("more", 7.0)}

    graph = drawing(build)
    with pytest.raises(NamesUnknown):
        graph.build({})
    assert added(graph, amount=3) == [7.0] * 3
    assert graph.builds == 1
    graph.close()


def words(operator: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"Critical error in pipeline:\nError in MIXED operator `{operator}`,\n"
        "which was used in the pipeline definition with the following traceback:\n\n"
        f'  File "{__file__}", line 15, in decode\n    image = dali.fn.{operator}(\n\nencountered:\n\n{what}\n'
        "Current pipeline object is no longer valid."
    )


@pytest.mark.parametrize(
    ("error", "sample", "usable"),
    [
        (words("nvidia.dali.fn.decoders.image", "Failed to decode sample #37 : "), 37, True),
        (words("nvidia.dali.fn.decoders.image", "nvImageCodec failure: '#4'"), None, True),
        (words("nvidia.dali.fn.slice", "[1000..1005] is not valid for image dimensions [74 x 80]"), None, True),
        (words("nvidia.dali.fn.external_source", "Inconsistent batch size"), None, False),
        (RuntimeError("an illegal memory access was encountered"), None, False),
        (ValueError("Failed to decode sample #3"), None, False),
    ],
)
def test_what_failed(error: Exception, sample: int | None, usable: bool) -> None:
    assert (sample_of(error), leaves_graph_usable(error)) == (sample, usable)


# --- graphs for a GPU, as far as DALI says it without one ----------------------------------------------------------


MODULES = ("image_classification", "object_detection", "speech_recognition")
HEADER = {"size": np.array([100, 120], np.int32), "rate": np.int32(8000)}


class Built(Exception):
    """The graph is described; what follows needs the GPU."""


def _graph(
    dali: Any, graph: DaliGraph, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, sampled: bool = True
) -> Any:
    """DALI's description of the graph."""
    found: list[Any] = []

    def build(self: Any) -> None:
        self._build_graph()
        found.append(self)
        raise Built

    monkeypatch.setattr(dali.Pipeline, "build", build)
    params = {number: pipeline.draw(number, HEADER, 0) for number in graph.stages if sampled}
    with pytest.raises(Built):
        graph.build(params)
    return found[0]


def _devices(graph: Any) -> dict[str, str]:
    """Where each operator's output lies, by its name."""
    return {op.name.strip("_").rstrip("_0123456789"): op.outputs[0].device for op in graph._ops}


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_every_split_of_every_pipeline(dali: Any, name: str, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before there is a sample whose draws could tell what is drawn."""
    pipeline = importlib.import_module(f"pipelines.{name}").pipeline()
    described = 0
    for split in pipeline.splits[:-1]:
        stages = range(split, len(pipeline.stages))
        for segment in segments(pipeline, stages, device="cuda", max_batch=4, threads=1):
            if isinstance(segment, DaliGraph):
                graph = _graph(dali, segment, pipeline, monkeypatch, sampled)
                assert {output.device for output in graph._graph_outputs} == {"gpu"}
                described += 1
    assert described


@pytest.mark.parametrize("regions", [True, False])
def test_a_photograph_comes_to_the_gpu_when_it_is_decoded_and_not_before(
    dali: Any, monkeypatch: pytest.MonkeyPatch, regions: bool
) -> None:
    """An nvJPEG that is not given regions decodes it whole, on the GPU too, which then cuts the box."""
    monkeypatch.setattr(nvjpeg, "decodes_regions", lambda: regions)
    pipeline = importlib.import_module("pipelines.image_classification").pipeline()
    stages = range(pipeline.splits[0], len(pipeline.stages))
    (segment,) = segments(pipeline, stages, device="cuda:1", max_batch=4, threads=3)
    assert isinstance(segment, DaliGraph)
    graph = _graph(dali, segment, pipeline, monkeypatch)
    assert (graph._device_id, graph._max_batch_size, graph.num_threads) == (1, 4, 3)
    devices = _devices(graph)
    assert {name: device for name, device in devices.items() if not name.startswith(("field", "stage"))} == {
        "TensorSubscript": "cpu",
        **({"ImageSlice": "gpu"} if regions else {"Image": "gpu", "Slice": "gpu"}),
        "Resize": "gpu",
        "Flip": "gpu",
        "CropMirrorNormalize": "gpu",
    }


@pytest.mark.parametrize("strided", [torch.arange(12.0).reshape(3, 4).T, torch.arange(16.0)[::2].reshape(4, 2)])
def test_what_a_function_has_made_strided_is_fed_as_dali_takes_it(dali: Any, strided: torch.Tensor) -> None:
    pipeline = mixed()
    graph = DaliGraph(pipeline, range(5, 6), frozenset({"row"}), device="cuda", max_batch=4, threads=1)
    graph._inputs = frozenset({"field0"})
    with pytest.raises(RuntimeError, match="Strided data not supported"):
        dali.tensors.TensorCPU(strided.numpy())
    fed: Any
    (fed,) = graph._feed([{"row": strided}], [{}])["field0"]
    assert np.array_equal(np.asarray(dali.tensors.TensorCPU(fed.numpy())), strided)


def _run(dali: Any, shapes: list[tuple[int, ...]]) -> Any:
    graph = dali.Pipeline(batch_size=4, num_threads=1, device_id=None, exec_dynamic=True, prefetch_queue_depth=1)
    with graph:
        graph.set_outputs(dali.fn.external_source(name="x") + np.float32(1))
    (output,) = graph.run(x=[np.full(shape, n, np.float32) for n, shape in enumerate(shapes)])
    return output


@pytest.mark.parametrize("shapes", [[(2, 3)] * 3, [(2, 3), (1, 3), (5, 3)], [(0, 3), (2, 3)]])
def test_samples_of_any_shapes_are_copied_at_once_into_one_block(dali: Any, shapes: list[tuple[int, ...]]) -> None:
    """On the CPU as on a GPU: rows of PyTorch's memory, that keep none of DALI's."""
    output = _run(dali, shapes)
    found = on_device(output, "cpu", None)
    assert [row.tolist() for row in found] == [np.full(shape, n + 1.0).tolist() for n, shape in enumerate(shapes)]
    assert len({row.untyped_storage().data_ptr() for row in found}) == 1
    lying = np.asarray(output[len(shapes) - 1])
    lying[:] = -1
    assert (found[-1] == len(shapes)).all()
