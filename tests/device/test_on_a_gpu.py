"""What a GPU does where the stand-in on the CPU does it in another way: decoding, streams, memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.device import nvjpeg
from minato_gpu.device.accelerator import Accelerator, is_out_of_memory
from minato_gpu.device.dali_graph import DaliGraph
from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.staging import Download, upload
from minato_gpu.device.values import to_numpy
from minato_gpu.lab.parity import whole_tolerance
from minato_gpu.pipeline.pipeline import DaliFragment, Field, Pipeline, Stage, TorchFunction
from minato_gpu.samples import StageError
from pipelines import image_classification
from tests.support.numbers import PIPELINE, Numbers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
_SOURCE = r'extern "C" __global__ void wait(volatile int* open) { while (*open == 0) {} }'


@contextmanager
def held_up(device: Accelerator, stream: Any) -> Iterator[None]:
    """What is issued on the stream within runs at the end of it. One thread of the GPU waits for the host's word."""
    import cupy

    word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    wait = cupy.RawKernel(_SOURCE, "wait")
    wait.compile()  # loading a kernel waits for the whole device
    with device.working(stream):
        wait((1,), (1,), (np.uint64(word.data_ptr()),))
    try:
        yield
    finally:
        word[0] = 1
        stream.synchronize()


def encoded(number: int) -> dict[str, Any]:
    """What the host read, the first stage, makes of a smooth photograph."""
    height, width = 200 + 40 * number, 320 - 20 * number
    rows, columns = np.mgrid[:height, :width]
    planes = [255 * rows // height, 255 * columns // width, (rows + columns + 9 * number) // 4 % 256]
    done, data = cv2.imencode(".jpg", np.stack(planes, axis=-1).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 95])
    assert done
    size = np.array((height, width), np.int32)
    return {"encoded": data.reshape(-1), "size": size, "progressive": np.bool_(False), "label": number}


def spoilt(fields: dict[str, Any]) -> dict[str, Any]:
    """What no decoder knows, with a header's word that it is a photograph.

    A file that is cut off is refused when it is read: of that the decoders' opinions differ.
    """
    return {**fields, "encoded": np.full(1000, 7, np.uint8)}


def check_close(image: Any, other: Any, pipeline: Pipeline, device: str, split: int = 0) -> None:
    """They differ by no more than the device's stages, from this one on, may."""
    limit = whole_tolerance(pipeline, device, split)
    deviation = np.abs(to_numpy(image) - to_numpy(other)) / pipeline.fields_at(len(pipeline.stages))["image"].level
    assert deviation.max() <= limit.maximum and deviation.mean() <= limit.mean


@pytest.mark.gpu
def test_micro_batches_that_are_scheduled_ahead_are_what_they_are_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever fails among them, which runs again meanwhile."""
    monkeypatch.setenv(nvjpeg.WAITS, "0")
    pipeline = image_classification.build(64, scale=(1.0, 1.0))
    split, device = pipeline.splits[0], Accelerator(torch.device("cuda"))
    executor = DeviceExecutor(pipeline, split, device="cuda", max_batch=4)
    sets: list[Any] = []
    for first in range(0, 20, 4):
        photographs = [encoded(n % 6) for n in range(first, first + 4)]
        if first == 8:
            photographs[1] = spoilt(photographs[1])
        given = [(pipeline.run(one, first + n, 1, split), first + n) for n, one in enumerate(photographs)]
        sets.append([(fields, executor.draws((fields, seed))) for fields, seed in given])
    alone = [executor.run(each) for each in sets]
    coming, begun = sets[1:], list[bool]()

    def look_ahead() -> None:
        if coming:
            begun.append(executor.ahead(coming.pop(0)))

    executor.at.scheduled, stream = look_ahead, device.stream()
    with device.working(stream):
        found = [executor.run(each, stream) for each in sets]
        event = device.event()
    event.synchronize()
    executor.close()
    assert begun[:3] == [True] * 3  # the last is asked for while what failed runs again: there is one ahead
    for each, well in zip(found, alone, strict=True):
        for one, other in zip(each, well, strict=True):
            assert isinstance(one, StageError) == isinstance(other, StageError)
            if not isinstance(one, StageError) and not isinstance(other, StageError):
                np.testing.assert_array_equal(to_numpy(one["image"]), to_numpy(other["image"]))
    assert sum(isinstance(one, StageError) for each in found for one in each) == 1


@pytest.mark.gpu
def test_a_loaders_batches_are_the_same_where_micro_batches_are_scheduled_ahead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image_classification.example_data(tmp_path)
    source: Any = image_classification.dataset(tmp_path)
    ahead, begun = DaliGraph.ahead, list[bool]()

    def noted(graph: DaliGraph, *given: Any) -> bool:
        begun.append(ahead(graph, *given))
        return begun[-1]

    monkeypatch.setattr(DaliGraph, "ahead", noted)
    found: list[list[Any]] = []
    for waits in ("1", "0"):
        monkeypatch.setenv(nvjpeg.WAITS, waits)
        loader: DataLoader[Any] = DataLoader(
            source,
            4,
            sampler=[*range(len(source))] * (1 + 96 // len(source)),
            num_workers=2,
            prefetch_factor=8,
            device="cuda",
            lanes=["device"],
            pipeline=image_classification.build(64),
            generator=torch.Generator().manual_seed(0),
        )
        found.append([batch["image"].cpu() for batch in loader])
        assert any(begun) is (waits == "0")
    for one, other in zip(*found, strict=True):  # micro-batches are cut otherwise, which nvJPEG decodes otherwise
        check_close(one, other, image_classification.build(64), "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_a_photograph_that_cannot_be_decoded_costs_no_other(device: str) -> None:
    """DALI names no sample here: the others of the micro-batch run again, and are what they would have been."""
    pipeline = image_classification.build(64, scale=(1.0, 1.0))
    split = pipeline.splits[0]
    samples = [spoilt(encoded(n)) if n == 2 else encoded(n) for n in range(6)]
    given = [(pipeline.run(fields, n, 1, split), n) for n, fields in enumerate(samples)]
    executor = DeviceExecutor(pipeline, split, device=device, max_batch=6)
    found = executor.run(given)
    bad = found.pop(2)
    assert isinstance(bad, StageError) and "in decode_dali\n" in str(bad)
    for n, result in zip((0, 1, 3, 4, 5), found, strict=True):
        assert not isinstance(result, StageError), result
        check_close(result["image"], pipeline.run(samples[n], n, 1)["image"], pipeline, device, split)
    assert executor.repeated == 6
    executor.run(given[:2])
    assert executor.repeated == 6
    assert [graph.builds for graph in executor._graphs] == [1], "DALI calls it no longer valid, and it works"
    executor.close()


@pytest.mark.gpu
@pytest.mark.parametrize("regions", [False, *([True] if nvjpeg.decodes_regions() else [])])  # they may end the process
def test_boxes_are_the_same_whoever_cuts_them(regions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older nvJPEG decodes whole photographs, of which the GPU cuts the boxes."""
    monkeypatch.setattr(nvjpeg, "decodes_regions", lambda: regions)
    pipeline = image_classification.build(64)
    split = pipeline.splits[0]
    given = [(pipeline.run(encoded(n), n, 1, split), n) for n in range(6)]
    executor = DeviceExecutor(pipeline, split, device="cuda", max_batch=6)
    for n, result in enumerate(executor.run(given)):
        assert not isinstance(result, StageError), result
        check_close(result["image"], pipeline.run(encoded(n), n, 1)["image"], pipeline, "cuda", split)
    assert executor.repeated == 0
    executor.close()


@pytest.mark.gpu
def test_what_cupy_does_while_the_lane_works_goes_to_the_lanes_stream() -> None:
    import cupy

    device = Accelerator(torch.device("cuda"))
    stream = device.stream()
    before = cupy.cuda.get_current_stream().ptr
    with device.working(stream):
        assert cupy.cuda.get_current_stream().ptr == stream.cuda_stream
        assert torch.cuda.current_stream() == stream
        made = cupy.arange(1 << 20, dtype=cupy.int64) + 1
        tensor, event = device.adopt(made), device.event()
    assert cupy.cuda.get_current_stream().ptr == before
    assert tensor.data_ptr() == made.data.ptr, "no copy"
    assert device.fetch(tensor, event).sum() == (1 << 19) * ((1 << 20) + 1)


@pytest.mark.gpu
def test_what_is_brought_to_the_host_does_not_wait_for_the_default_stream() -> None:
    device = Accelerator(torch.device("cuda"))
    with device.running(device.stream()):
        tensor = torch.full((1000,), 7, device="cuda")
        event = device.event()
    with held_up(device, torch.cuda.default_stream()):  # by training
        assert device.fetch(tensor, event).tolist() == [7] * 1000


@pytest.mark.gpu
def test_nobody_waits_for_what_is_on_its_way() -> None:
    """Neither for what a torch stage is given, nor for what a ``collate_fn`` is to join, behind work of any length."""
    device = Accelerator(torch.device("cuda"))
    stream = device.stream()
    for late in (False, True):  # the first time memory is taken, which may wait for the device
        with held_up(device, stream) if late else nullcontext(), device.working(stream):
            values = [np.full((100 + n, 100), n, np.float32) for n in range(64)]
            tensors = upload(device, values)
            download, event = Download(device, tensors), device.event()
            assert not (late and event.query())
        event.synchronize()
        assert all(map(np.array_equal, download.arrays(), values))
        del tensors, download  # whose memory is there for the next time


@pytest.mark.gpu
def test_the_default_stream_has_the_lowest_priority() -> None:
    """So a stream of the lane's that is no higher cannot push training aside."""
    device = Accelerator(torch.device("cuda"))
    stream: Any = device.stream()
    assert stream.priority == torch.cuda.default_stream().priority == 0
    of_streams: Any = torch.cuda.Stream
    least, greatest = of_streams.priority_range()
    assert greatest < least == 0


@pytest.mark.gpu
def test_a_device_without_memory_says_so_as_it_is_understood() -> None:
    with pytest.raises(Exception, match="memory") as caught:
        Accelerator(torch.device("cuda")).empty(1 << 50)
    assert is_out_of_memory(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", [["device"], ["cpu", "device"]], ids="+".join)
def test_beyond_a_budget_samples_come_by_way_of_the_host(lanes: Any) -> None:
    loader = DataLoader(
        Numbers(), 8, num_workers=2, device="cuda", pipeline=PIPELINE, lanes=lanes, device_memory_budget=1
    )
    labels = []
    for batch in loader:
        over = batch["x"] - 2 * batch["label"][:, None, None]
        assert bool(((over >= 0) & (over <= 2) & (over == over[:, :1, :1])).all())
        labels += batch["label"].tolist()
    assert labels == list(range(len(Numbers())))
    if lanes == ["device"]:
        assert loader.stats()["device_lane"]["spilled_to_host"] > 0


# --- what DALI reads, and what training does meanwhile -----------------------------------------------------------


FIELD = Field(np.uint8, (None,))


def inverting(*before: Stage) -> Pipeline:
    """A graph that inverts bytes, after those stages."""
    flip = Stage(
        "flip",
        ("x",),
        {"x": FIELD},
        cpu=lambda fields, params: {"x": 255 - fields["x"]},
        device=DaliFragment(
            lambda dali, fields, params, device: {"x": dali.fn.cast(255 - fields["x"], dtype=dali.types.UINT8)}
        ),
    )
    return Pipeline((*before, flip), outputs=("x",), inputs={"x": FIELD}, name="inverting")


def stacked(results: Any) -> Any:
    """What was made of all samples, on the host."""
    return np.stack([to_numpy(one["x"]) for one in results])


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_are_held_for_as_long_as_dali_reads_them(device: str) -> None:
    """Their memory is used again once results are there."""
    executor = DeviceExecutor(inverting(), 0, device=device, max_batch=64, threads=4)
    arrays = np.zeros((64, 50_000), np.uint8)
    for number in range(20 if device == "cpu" else 200):
        arrays[:] = number % 200
        results = executor.run([({"x": row}, n) for n, row in enumerate(arrays)])
        arrays[:] = 201
        assert (stacked(results) == 255 - number % 200).all()
    executor.close()


@pytest.mark.gpu
def test_what_the_device_has_made_is_read_in_time() -> None:
    """A graph reads what a torch stage makes, behind work that keeps the stream busy."""
    add = Stage(
        "add",
        ("x",),
        {"x": FIELD},
        cpu=lambda fields, params: {"x": fields["x"] + 1},
        device=TorchFunction(lambda fields, params: {"x": fields["x"] + 1}),
    )
    executor = DeviceExecutor(inverting(add), 0, device="cuda", max_batch=64, threads=4)
    accelerator = Accelerator(torch.device("cuda"))
    stream = accelerator.stream()
    for number in range(50):
        items = [({"x": np.full(50_000, (number + n) % 200, np.uint8)}, n) for n in range(64)]
        with accelerator.working(stream):
            torch.cuda._sleep(20_000_000)
            results = executor.run(items, stream)
            found = stacked(results)
        assert (found == 254 - (number + np.arange(64)[:, None]) % 200).all()
    executor.close()


@pytest.mark.gpu
def test_a_cuda_graph_can_be_captured_while_the_lane_works() -> None:
    """As the manual's page about GPUs advises."""
    batches = iter(DataLoader(Numbers(), 8, num_workers=1, pipeline=PIPELINE, lanes=["device"], device="cuda"))
    graph, x = torch.cuda.CUDAGraph(), torch.ones(1000, device="cuda")
    next(batches)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(2000):
            x = x * 1.0
    graph.replay()
    torch.cuda.synchronize()
    assert bool((x == 1.0).all())
