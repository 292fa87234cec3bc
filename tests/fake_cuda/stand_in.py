"""Tests of the stand-in, for ``make rehearse``: they mean nothing on a GPU, and pytest does not collect this file."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack

_RUN = """
import numpy as np, nvidia.dali as dali, nvidia.dali.fn as fn
with dali.Pipeline(2, 1, 0) as graph:
    graph.set_outputs(fn.constant(idata=7, device="gpu"))
graph.build()
print(graph.run()[0].as_cpu().as_array())
"""


def dali() -> Any:
    """DALI, and its operators."""
    importlib.import_module("nvidia.dali.fn")
    return importlib.import_module("nvidia.dali")


def test_kernels_compute_on_the_device() -> None:
    made = (torch.arange(12.0, device="cuda").reshape(3, 4).T @ torch.ones(3, 1, device="cuda")).to(torch.int32)
    assert made.is_cuda and made.flatten().tolist() == [12, 15, 18, 21]


def test_draws_leave_the_cpus_generator_alone() -> None:
    before = torch.get_rng_state()
    assert torch.randn(9, device="cuda").is_cuda and torch.equal(torch.get_rng_state(), before)


def test_streams_run_on_their_own_until_they_are_waited_for() -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1755 * 200_000)  # 0.2 s
        event.record()
    assert not event.query() and not stream.query()
    event.synchronize()
    stream.synchronize()  # a stream is idle a moment after its last event
    assert event.query() and stream.query()


def test_dalis_iterator_gives_tensors_of_the_device() -> None:
    plugin = importlib.import_module("nvidia.dali.plugin.pytorch")
    fn = dali().fn
    with dali().Pipeline(2, 1, 0, exec_dynamic=False) as graph:
        drawn = fn.random.uniform(range=(0, 1), shape=[4, 5, 3])
        graph.set_outputs(fn.crop_mirror_normalize(drawn.gpu(), crop=(2, 2)), drawn)
    (batch,) = next(plugin.DALIGenericIterator([graph], ["gpu", "cpu"], prepare_first_batch=False))
    assert batch["gpu"].is_cuda and batch["gpu"].shape == (2, 3, 2, 2) and not batch["cpu"].is_cuda


def test_dali_is_fed_what_lies_on_the_device_once_its_stream_has_come_to_it() -> None:
    fn, given = dali().fn, [torch.zeros(n + 1, dtype=torch.uint8, pin_memory=True) for n in range(2)]
    with dali().Pipeline(2, 1, 0, prefetch_queue_depth=1) as graph:
        graph.set_outputs(fn.external_source(name="x", device="gpu") * 2)
    graph.build()
    there = [one.cuda() for one in given]
    torch.cuda._sleep(1755 * 50_000)
    for n, one in enumerate(there):
        one.copy_(given[n].fill_(n + 3), non_blocking=True)
    graph.feed_input("x", there)
    assert [np.asarray(one).tolist() for one in graph.run()[0].as_cpu()] == [[6], [8, 8]]


def test_dalis_dynamic_mode_works_on_the_device() -> None:
    dynamic = importlib.import_module("nvidia.dali.experimental.dynamic")
    made = dynamic.flip(dynamic.as_batch([torch.arange(6.0, device="cuda").view(1, 6, 1)] * 2))
    assert str(made.device) == "gpu:0"
    assert torch.utils.dlpack.from_dlpack(dynamic.as_tensor(made))[1].flatten().tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(("fails", "status"), [("", 0), ("1", 1), ("crash", -signal.SIGSEGV)])
def test_graphs_fail_on_request(fails: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DALI_FAILS", fails)
    found = subprocess.run([sys.executable, "-c", _RUN], capture_output=True, text=True, check=False)
    assert found.returncode == status, found.stderr
    assert ("nvImageCodec" in found.stderr) == (fails == "1")


def test_nvml_knows_the_device_and_its_memory() -> None:
    nvml: Any = importlib.import_module("pynvml")
    kept = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    assert nvml.nvmlDeviceGetMemoryInfo(handle).used >= kept.nbytes
    assert nvml.nvmlDeviceGetJpgUtilization(handle)[0] == 25 and nvml.nvmlDeviceGetUtilizationRates(handle).gpu == 50
    assert len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)) == 1


def test_torchvision_decodes_to_the_device() -> None:
    io = pytest.importorskip("torchvision.io")
    encoded = io.encode_jpeg(torch.full((3, 8, 9), 120, dtype=torch.uint8))
    (decoded,) = io.decode_jpeg([encoded], device="cuda")
    assert decoded.is_cuda and decoded.shape == (3, 8, 9)
