"""Where the device's memory is short: smaller micro-batches, then the CPU lane alone, said once and counted."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader, Pipeline
from minato_gpu.lanes.base import Failure, Local
from minato_gpu.lanes.device import DeviceExecutor
from minato_gpu.lanes.device_lane import DeviceLane
from minato_gpu.lanes.functions import FunctionSegment
from minato_gpu.memory.accelerator import is_out_of_memory
from minato_gpu.pipeline import CupyFunction
from minato_gpu.samples import sample_seed
from tests.lanes.harness import open_links, piece, task
from tests.lanes.test_device_lane import PIPELINE, Numbers, expected, report_of, sources


@pytest.fixture
def capacity(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples of a micro-batch fit into the device's memory, in a list that a test may change."""
    limit, run = [100], FunctionSegment.run

    def short(self: FunctionSegment, batch: Any, drawn: Any) -> Any:
        if len(batch) > limit[0]:
            raise torch.OutOfMemoryError(f"{len(batch)} samples")
        return run(self, batch, drawn)

    monkeypatch.setattr(FunctionSegment, "run", short)
    return limit


def test_micro_batches_shrink_until_they_fit_and_stay_small(capacity: list[int]) -> None:
    keys = range(20, 36)
    with open_links(1) as links:
        lane, short = DeviceLane(links, PIPELINE, "cpu", 16, may_retire=True), []
        capacity[0] = 3
        for chunk in (1, 2):
            lane.send(task(piece([*keys], sources=sources([*keys])), chunk=chunk))
            report = report_of(lane)
            assert report.done == 16 and report.repeated == 0, "the device has made all of them"
            for key, item in zip(keys, report.items or [], strict=True):
                want = expected(key, sample_seed(77, 0, key))["x"]
                assert isinstance(item, Local) and np.allclose(item.value["x"], want, atol=1e-6)
            short.append(lane.stats()["short_of_memory"])
        assert lane.stats()["micro_batch"] == 2 and not lane.retired
        assert short[0] == short[1] == 3, "of 16, 8 and 4 samples: the next micro-batches fit at once"
        assert lane.close(5.0)


def test_an_executor_that_has_no_memory_for_a_single_sample_says_so(capacity: list[int]) -> None:
    capacity[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        DeviceExecutor(PIPELINE, 1, max_batch=4).run([(PIPELINE.run({"n": 20}, 20, stop=1), 20)])


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory"), True),
        (RuntimeError("CUDA driver API error CUDA_ERROR_OUT_OF_MEMORY (2)"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("Error in GPU operator `fn.resize`: Can't allocate 67108864 bytes on device 0."), True),
        (RuntimeError("Error in MIXED operator `decoders.image_slice`: CUDA allocation failed"), True),
        (MemoryError(), True),
        (type("OutOfMemoryError", (Exception,), {})("cupy's own"), True),
        (ValueError("a photograph of someone out of memory"), False),
        (RuntimeError("an illegal memory access was encountered"), False),
    ],
)
def test_what_counts_as_short_memory(error: Exception, short: bool) -> None:
    assert is_out_of_memory(error) is short
    outer = ValueError("stage failed")
    outer.__cause__ = error
    assert is_out_of_memory(outer) is short


def test_the_lane_retires_and_gives_back_what_it_was_sent(
    capacity: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with open_links(1) as links:
        lane = DeviceLane(links, PIPELINE, "cpu", 4, may_retire=True)
        capacity[0] = 0
        with caplog.at_level(logging.WARNING, "minato_gpu"):
            lane.send(task(piece([20, 21], sources=sources([20, 21])), chunk=1))
            report = report_of(lane)
            assert report.done == 2 and report.repeated == 2, (
                "what it had begun it prepares by the CPU's implementation"
            )
            lane.send(task(piece([22], sources=sources([22])), chunk=2))
            report = report_of(lane)
            assert (report.chunk, report.done, report.final) == (2, 0, True)
        assert lane.retired and lane.stats()["retired"]
        assert [record.message[:31] for record in caplog.records] == ["the device has no memory left t"]
        assert lane.close(5.0)


def test_a_sample_that_no_memory_is_enough_for_says_nothing_of_the_devices() -> None:
    """An absurd header, say: the device lane goes on, with micro-batches as large as before."""

    def grown(fields: Any, params: Any) -> Any:
        if fields["x"][0] == 21:
            raise MemoryError("Unable to allocate 512. TiB")
        return {"x": fields["x"] + np.float32(1)}

    stage = dataclasses.replace(PIPELINE.stages[1], cpu=grown, device=CupyFunction(lambda xp, *given: grown(*given)))
    pipeline = Pipeline((PIPELINE.stages[0], stage), outputs=PIPELINE.outputs, name="tests")
    with open_links(1) as links:
        lane = DeviceLane(links, pipeline, "cpu", 4, may_retire=True)
        for chunk in (1, 2):
            lane.send(task(piece([20, 21, 22, 23], sources=sources([20, 21, 22, 23])), chunk=chunk))
            items = report_of(lane).items or []
            assert [isinstance(item, Failure) for item in items] == [False, True, False, False]
        stats = lane.stats()
        assert (stats["retired"], stats["micro_batch"]) == (False, 4)
        assert lane.close(5.0)


@pytest.mark.parametrize("lanes", [["device"], ["cpu", "device"]], ids="+".join)
def test_a_library_that_is_missing_is_named_once_and_the_cpu_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lanes: list[str], no_leaks: None
) -> None:
    def load(self: Any) -> None:
        raise ModuleNotFoundError("No module named 'cupy'", name="cupy")

    def run(self: Any, batch: Any, drawn: Any) -> Any:
        load(self)

    monkeypatch.setattr(FunctionSegment, "load", load)
    monkeypatch.setattr(FunctionSegment, "run", run)
    keys = [key for key in range(40) if key != 13]
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        for _ in range(2):
            loader = DataLoader(Numbers(), 4, sampler=keys, num_workers=1, pipeline=PIPELINE, lanes=lanes)
            assert [int(n) for batch in loader for n in batch["label"]] == keys
    assert len(caplog.records) == 1 and "cupy" in caplog.records[0].message
    del loader


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("lanes", [["device"], ["cpu", "device"]], ids="+".join)
def test_a_loader_goes_on_without_the_device(
    capacity: list[int], caplog: pytest.LogCaptureFixture, lanes: list[str], in_order: bool, no_leaks: None
) -> None:
    """Everything is delivered once, also in the epoch after."""
    keys = [key for key in range(40) if key != 13]
    more: dict[str, Any] = {"pipeline": PIPELINE, "lanes": lanes, "persistent_workers": True, "in_order": in_order}
    capacity[0] = 0
    loader = DataLoader(Numbers(), 4, sampler=keys, num_workers=1, **more)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        for _ in range(2):
            assert sorted(int(n) for batch in loader for n in batch["label"]) == keys
    device = loader.stats()["device_lane"]
    assert device["retired"] is (len(lanes) == 2)
    assert len(caplog.records) == (1 if len(lanes) == 2 else 0)
    del loader
