"""How the device lane opens: what goes wrong there is told, and nothing waits for a lane that never comes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from minato_gpu import DataLoader, Pipeline, Stage
from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.lane import DeviceLane
from minato_gpu.lanes.base import Local, Report
from minato_gpu.lanes.contract import Opened
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.pipeline.pipeline import DaliFragment
from tests.lanes.harness import piece, task
from tests.lanes.lanes import of_kind
from tests.support.numbers import BATCH, LENGTH, PIPELINE, Numbers

READ, SHIFT, DOUBLE = PIPELINE.stages


def _double_in_dali(dali: Any, reads: Any, params: Any, device: str) -> Any:
    return {"x": reads["x"] * 2.0}


def piped(*stages: Stage) -> Pipeline:
    """The host read, and these stages."""
    return Pipeline((READ, *stages), outputs=("x", "label"), name="tests")


def loaded(lanes: Any, pipeline: Pipeline = PIPELINE) -> list[int]:
    loader = DataLoader(Numbers(), BATCH, num_workers=1, pipeline=pipeline, lanes=lanes, timeout=20)
    return [int(n) for batch in loader for n in batch["label"]]


def send(lane: DeviceLane, pipeline: Pipeline, key: int) -> None:
    lane.send(task(piece([key], sources=[Local((pipeline.run({"n": key}, 0, stop=1), None), 8)])))


def items_of(lane: DeviceLane) -> list[Any]:
    """The items of the next report."""
    return list(of_kind(lane, Report)[0].items or [])


def _boom(*_: Any) -> Any:
    raise RuntimeError("CUDA error: out of memory")


@pytest.mark.usefixtures("no_leaks")
def test_the_only_lane_that_cannot_be_opened_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceExecutor, "load", _boom)
    with pytest.raises(RuntimeError, match=r"the device lane cannot be opened: .*out of memory") as caught:
        loaded(["device"])
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.usefixtures("no_leaks")
def test_beside_another_one_it_retires(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(DeviceExecutor, "load", _boom)
    with caplog.at_level(logging.WARNING):
        assert loaded(["cpu", "device"]) == list(range(LENGTH))
    assert "the CPU lane goes on alone" in caplog.text


def test_every_graph_is_built_before_the_lane_says_that_it_is_open(links: WorkerChannels) -> None:
    """Also those of split points. From then on nobody is stopped by one that is being built."""
    stage = replace(DOUBLE, device=DaliFragment(_double_in_dali))
    pipeline = piped(stage, replace(stage, name="twice"))
    lane = DeviceLane(links, pipeline, "cpu", 4, may_retire=True)
    assert of_kind(lane, Opened) == [Opened(1)]
    assert all(lane.offers(split) for split in (pipeline.host_prefix, *pipeline.cuts))
    builds = [executor.builds for executor in lane._executors.values()]
    for key in (1, 2, 3):
        send(lane, pipeline, key)
        assert items_of(lane)[0].value["x"][0, 0] == 4.0 * key
    assert [executor.builds for executor in lane._executors.values()] == builds == [1, 1]
    assert lane.close(5.0)


def test_a_graph_that_wants_to_know_all_names_is_built_with_the_first_sample(links: WorkerChannels) -> None:
    def all_of_them(dali: Any, reads: Any, params: Any, device: str) -> Any:
        return {"x": reads["x"] + sum(params[name] for name in params)}

    pipeline = piped(DOUBLE, replace(SHIFT, device=DaliFragment(all_of_them)))
    lane = DeviceLane(links, pipeline, "cpu", 4, may_retire=True)
    assert of_kind(lane, Opened) == [Opened(1)]
    assert not any(lane.offers(split) for split in (pipeline.host_prefix, *pipeline.cuts))
    send(lane, pipeline, 3)
    assert 6.0 < items_of(lane)[0].value["x"][0, 0] < 7.0
    assert all(lane.offers(split) for split in (pipeline.host_prefix, *pipeline.cuts))
    assert [executor.builds for executor in lane._executors.values()] == [1, 1]
    assert lane.close(5.0)


def _no_device(dali: Any, reads: Any, params: Any) -> Any:
    return {"x": reads["x"]}


def _python_if(dali: Any, reads: Any, params: Any, device: str) -> Any:
    return {"x": reads["x"] if reads["x"] > 0 else -reads["x"]}


def _undeclared(dali: Any, reads: Any, params: Any, device: str) -> Any:
    return {"x": reads["label"] if "a" in params else reads["label"] + 1}


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (_no_device, TypeError, "takes 3 positional arguments"),
        (_python_if, TypeError, "conditional"),
        (_undeclared, KeyError, "'label'"),
    ],
)
def test_a_fragment_that_cannot_be_built(
    build: Any, error: type[Exception], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The only lane raises, and nothing is logged beside that."""
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match="the device lane .*" + text) as caught:
        loaded(["device"], piped(replace(DOUBLE, device=DaliFragment(build))))
    assert isinstance(caught.value.__cause__, error)
    assert "fragment of stage 'double'" in str(caught.value.__cause__.__notes__)
    assert not caplog.records
