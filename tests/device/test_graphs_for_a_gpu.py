"""What DALI says of the graphs that a GPU runs, as far as it says it without one: names and types of all arguments, and
what may lie where. The backend, which would need the GPU, is not made."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.device import nvjpeg
from minato_gpu.device.dali_graph import DaliGraph
from minato_gpu.device.dali_outputs import on_device
from minato_gpu.device.executor import segments
from minato_gpu.pipeline.pipeline import Pipeline
from tests.device.test_segments import mixed

MODULES = ("image_classification", "object_detection", "speech_recognition")
HEADER = {"size": np.array([100, 120], np.int32), "rate": np.int32(8000)}


@pytest.fixture
def dali() -> Any:
    """Imported late: whoever forks after that takes longer for it."""
    return pytest.importorskip("nvidia.dali")


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
